"""The arrays of a checkpoint by name, such as "params/blocks/block_0/attention/query/kernel".

Scanned layers hold an array once, with a leading axis: "scanned_blocks/block_i/..." [G, ...], where
block_i of group g is layer g n + i of G n. One by one they are "blocks/block_{g n + i}/..." [...].
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moe_jax.checkpoints.files import CheckpointError

_SCANNED = re.compile(r"(.*/)scanned_blocks/block_(\d+)/(.*)")


def arrays_by_name(trees: dict[str, Any]) -> dict[str, Any]:
    """The leaves of named nested dicts, by the keys on the way joined with "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def trees_by_name(arrays: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``arrays_by_name``."""
    trees: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        place = trees
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return trees


def one_by_one(arrays: dict[str, Any]) -> dict[str, Any]:
    """``arrays`` with an entry for each layer in place of scanned ones.

    Args:
      arrays: by name, those of all parameters among them; numpy arrays give views.
    """
    size, unstacked = _group_size(arrays), {}
    for name, array in arrays.items():
        match = _SCANNED.fullmatch(name)
        if match is None:
            unstacked[name] = array
            continue
        for group in range(array.shape[0]):
            unstacked[_layer_name(match, group, size)] = array[group]
    return unstacked


def gather(wanted: dict[str, Any], given: dict[str, Any], read: Callable[[str], np.ndarray]):
    """The arrays of a model out of those of a file, whose layers may be one by one.

    Args:
      wanted: ``jax.ShapeDtypeStruct`` by name, of all arrays of the model.
      given: as ``wanted``, of the file.
      read: from a name in ``given`` to its array.

    Returns:
      Arrays by the names of ``wanted``.

    Raises:
      CheckpointError: names an array that is missing, of another shape or dtype, or of no use.
    """
    size = _group_size(wanted)
    parts = {name: _parts(name, shape, size, given) for name, shape in wanted.items()}
    needed = {part: shape for several in parts.values() for part, shape in several.items()}
    missing = [name for name in needed if name not in given]
    unused = [name for name in given if name not in needed]
    for what, names in (("misses", missing), ("has what this model has not:", unused)):
        if names:
            raise CheckpointError(f"the file {what} {_shortened(names)}")
    for name, shape in needed.items():
        if (given[name].shape, given[name].dtype) != (shape.shape, shape.dtype):
            raise CheckpointError(
                f"{name}: got {_type(given[name])}; allowed: {_type(shape)}, as the model has"
            )
    arrays = {}
    for name, several in parts.items():
        read_parts = [read(part) for part in several]
        arrays[name] = read_parts[0] if name in several else np.stack(read_parts)
    return arrays


def _group_size(names):
    """n, the number of layers in a group of scanned layers; 0 without any."""
    matches = map(_SCANNED.fullmatch, names)
    return max((int(match[2]) for match in matches if match), default=-1) + 1


def _parts(name, shape, size, given):
    """{name in the file: its shape} of what makes up the array ``name`` of the model."""
    match = _SCANNED.fullmatch(name)
    # A shape is only a claim: more layers than there are arrays are not one by one.
    if match is None or name in given or shape.shape[0] > len(given):
        return {name: shape}
    layer = jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype)
    return {_layer_name(match, group, size): layer for group in range(shape.shape[0])}


def _layer_name(match, group, size):
    before, block, rest = match.groups()
    return f"{before}blocks/block_{group * size + int(block)}/{rest}"


def _type(leaf):
    return f"{leaf.dtype}{list(leaf.shape)}"


def _shortened(names):
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
