"""Reading files that a stranger may have written: data alone, and no larger than the file.

Nothing here executes what it reads: pickles and arrays of Python objects are refused. What a header
claims is compared with the size of the file before memory is taken for it.
"""

import json
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# No compression that zip knows by this name makes more of a byte.
_LARGEST_DEFLATE_RATIO = 1032
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def one_line(text: str) -> str:
    """``text`` with line breaks, codes of terminals and the like written as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def parse_json(text: str | bytes) -> Any:
    """What the JSON text says.

    Raises:
      ValueError: no JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_npy(path: str | Path) -> np.ndarray:
    """The array of an .npy file, memory mapped and read-only.

    Raises:
      ValueError: no such file, one of Python objects, or one that claims more than it holds; the
        message does not name the path.
    """
    with open(path, "rb") as file:
        shape, is_fortran, dtype = _read_header(file)
        offset, size = file.tell(), os.fstat(file.fileno()).st_size
        _check_size(shape, dtype, size - offset)
    order = "F" if is_fortran else "C"
    if 0 in shape:  # nothing to map
        return np.zeros(shape, dtype, order)
    return np.memmap(path, dtype, "r", offset, shape, order)


def load_npz(path: str | Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of these names in an .npz file.

    Raises:
      ValueError: no such file, a missing array, one of Python objects, or one that claims more than
        it holds; the message does not name the path.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return {name: _read_member(archive, f"{name}.npy") for name in names}
        except Exception as error:  # zipfile fails in many ways on damage
            raise ValueError(f"no npz file of {', '.join(names)} ({_reason(error)})") from None


def _read_member(archive, name):
    info = archive.getinfo(name)
    if info.compress_type not in _COMPRESSIONS:
        raise ValueError(f"{name}: got compression {info.compress_type}; allowed: deflate, or none")
    if info.file_size > _LARGEST_DEFLATE_RATIO * info.compress_size:
        raise ValueError(f"{name}: claims {info.file_size} bytes, more than it can hold")
    with archive.open(info) as file:
        shape, is_fortran, dtype = _read_header(file)
        size = _check_size(shape, dtype, info.file_size - file.tell())
        array = np.frombuffer(file.read(size), dtype, math.prod(shape))
    return array.reshape(shape, order="F" if is_fortran else "C")


def _read_header(file: BinaryIO):
    """(shape, whether columns come first, dtype) of an .npy file; leaves the file at its data."""
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        shape, is_fortran, dtype = read_header[version](file)
    except Exception as error:  # a header is the text of a Python literal, and may fail in any way
        raise ValueError(f"no npy file ({_reason(error)})") from None
    if dtype.hasobject:
        raise ValueError("got an array of Python objects; allowed: numbers")
    if any(size < 0 for size in shape):
        raise ValueError(f"got the shape {shape}; allowed: sizes >= 0")
    return shape, is_fortran, dtype


def _reason(error):
    return " ".join(f"{error or type(error).__name__}".split())


def _check_size(shape, dtype, available):
    """The bytes of the array, which must be ``available``."""
    size = math.prod(shape) * dtype.itemsize
    if size != available:
        raise ValueError(f"claims {size} bytes, but has {available}")
    return size
