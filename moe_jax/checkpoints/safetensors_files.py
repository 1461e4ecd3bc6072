"""Arrays by name in the format safetensors, in one file or in shards with an index.

The library checks the header of a file against its size before it takes memory, and the format has
no place for code. An index, as others write it too, is {"metadata": {"total_size": bytes},
"weight_map": {name: file}}.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.checkpoints.files import CheckpointError
from moe_jax.untrusted import parse_json

INDEX_SUFFIX = ".index.json"

# Of those that the format knows, the ones that numpy does.
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}


class SafetensorsReader(NamedTuple):
    """Open files of arrays.

    Attributes:
      metadata: texts by name, of the first file.
      shapes: ``jax.ShapeDtypeStruct`` by the name of each array.
    """

    metadata: dict[str, str]
    shapes: dict[str, jax.ShapeDtypeStruct]
    files: dict[str, Any]

    def read(self, name: str) -> np.ndarray:
        """The array of a name in ``shapes``."""
        return self.files[name].get_tensor(name)


def write_safetensors(
    path: Path, arrays: dict[str, Any], metadata: dict[str, str], *, max_shard_bytes: int
) -> list[Path]:
    """Writes ``path``, or its shards and their index if the arrays do not fit into one.

    Args:
      path: such as model.safetensors; shards are model-00001-of-00003.safetensors, their index is
        model.safetensors.index.json.
      arrays: by name. Only those of one shard are copied at a time.
      metadata: texts, in each file.
      max_shard_bytes: of the arrays in a file; one that is larger has a file of its own.

    Returns:
      The files written.
    """
    from safetensors.numpy import save_file

    shards = _shards(arrays, max_shard_bytes)
    files = [path]
    if len(shards) > 1:
        count = len(shards)
        files = [
            path.with_name(f"{path.stem}-{i:05}-of-{count:05}{path.suffix}")
            for i in range(1, count + 1)
        ]
    for file, names in zip(files, shards, strict=True):
        with _in_one_piece(file) as temporary:
            shard = {name: np.asarray(arrays[name], order="C") for name in names}
            save_file(shard, temporary, metadata)
    if len(shards) == 1:
        return files
    total_size = sum(arrays[name].nbytes for name in arrays)
    weight_map = {
        name: file.name for file, names in zip(files, shards, strict=True) for name in names
    }
    index = path.with_name(path.name + INDEX_SUFFIX)
    with _in_one_piece(index) as temporary:
        content = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    return [*files, index]


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsReader]:
    """Opens ``path``, or the shards of the index ``path`` (or ``path``.index.json, if it exists).

    Raises:
      CheckpointError: a file is missing, damaged, or not of this format.
    """
    from safetensors import SafetensorError, safe_open

    index = path if path.name.endswith(".json") else path.with_name(path.name + INDEX_SUFFIX)
    files = (
        _indexed_files(index)
        if index.exists() and not (path.exists() and path != index)
        else [path]
    )
    metadata, shapes, owners = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="numpy"))
                metadata = metadata or opened.metadata() or {}
                for name in opened.keys():
                    if name in shapes:
                        raise CheckpointError(f"{file}: has {name}, as another shard does")
                    shapes[name], owners[name] = _shape(opened.get_slice(name), name), opened
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(f"{file}: no safetensors file ({reason})") from None
        yield SafetensorsReader(metadata, shapes, owners)


def _indexed_files(index):
    """The files that an index names, all of its own folder."""
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index of shards ({error!r})") from None
    if outside or not names:
        raise CheckpointError(
            f"{index}: weight_map names {outside[:1] or 'no file'}; allowed: files beside it"
        )
    return [index.with_name(name) for name in names]


def _shape(part, name):
    dtype = part.get_dtype()
    if dtype not in _DTYPES:
        raise CheckpointError(f"{name}: got dtype {dtype}; allowed: {', '.join(_DTYPES)}")
    return jax.ShapeDtypeStruct(tuple(part.get_shape()), _DTYPES[dtype])


def _shards(arrays, max_bytes):
    """The names in ``arrays``, in lists of at most so many bytes."""
    shards, room = [[]], max_bytes
    for name, array in arrays.items():
        if array.nbytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= array.nbytes
    return shards


@contextlib.contextmanager
def _in_one_piece(path):
    """A temporary path that becomes ``path`` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
