"""The files of a checkpoint: which there are, and whether they are as they were written.

A checkpoint is a folder named by its step. It appears by a rename once everything in it is
written, and ``files.json`` in it has the size and CRC-32 of every other file: orbax detects a
truncated array but not a flipped bit, and fails on either in its own many ways.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_jax.untrusted import one_line, parse_json

MANIFEST = "files.json"
# Orbax notes the time of the commit in this one afterwards; nothing is restored from it.
_UNCHECKED = ("_CHECKPOINT_METADATA",)
_METRICS = "metrics/"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def saved_steps(directory: str | Path) -> list[int]:
    """The steps that have a checkpoint in ``directory``, rising; half-written ones are none."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if _is_step(p.name) and p.is_dir())


def _is_step(name):
    """Whether it is a number as a checkpoint is named: no 040, no digits but ASCII's."""
    return name.isascii() and name.isdigit() and name == str(int(name))


def write_manifest(checkpoint: Path) -> None:
    """Writes ``files.json`` about the files that are in the folder ``checkpoint`` now."""
    files = {str(p.relative_to(checkpoint)): _size_and_crc(p) for p in _files(checkpoint)}
    (checkpoint / MANIFEST).write_text(json.dumps(files, indent=1))


def find_damage(checkpoint: Path, folder: str = "") -> str | None:
    """What is wrong with the first file that is not as ``files.json`` has it; None if all are.

    Only the files of ``folder`` in the checkpoint are read, if one is named.
    """
    try:
        files = parse_json((checkpoint / MANIFEST).read_bytes())
        listed = [(name, size, crc) for name, (size, crc) in files.items()]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    if not listed:
        return f"{MANIFEST} is damaged"
    there = {str(path.relative_to(checkpoint)): path for path in _files(checkpoint)}
    for name, size, crc in listed:
        if not name.startswith(folder):
            continue
        path = there.get(name)  # not opened by the name: a list may name files of any folder
        if path is None:
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        try:
            if _size_and_crc(path)[1] != crc:
                return f"{name} has changed since it was written"
        except OSError as error:  # a disk that fails
            return f"{name} cannot be read: {error.strerror}"
    return None


def check_checkpoint(directory: Path, step: int) -> None:
    """Checks all files of the checkpoint of ``step``.

    Raises:
      CheckpointError: says what is wrong, and which earlier checkpoint is good.
    """
    damage = find_damage(directory / str(step))
    if damage:
        raise CheckpointError(
            f"checkpoint {directory / str(step)} is damaged: {damage};"
            f" {describe_good(directory, before=step)}; move the damaged one away to go on without"
        )


def set_aside_damaged(directory: str | Path, say: Callable[[str], None] = print) -> int:
    """Finds the newest good checkpoint, and renames the damaged ones that are newer than it.

    ``40`` becomes ``40.damaged``, which is no checkpoint, so that step 40 can be saved again. Older
    checkpoints are not read, but for their metrics: orbax reads those of all when it opens. To be
    called before ``Checkpoints``.

    Args:
      directory: of the checkpoints.
      say: is told of each that is renamed, in one line.

    Returns:
      The step of the newest good checkpoint; 0 where there has never been one.

    Raises:
      CheckpointError: there are checkpoints, and none is good; they stay as they are.
    """
    directory = Path(directory)
    damaged, good = {}, None
    for step in reversed(saved_steps(directory)):
        damage = find_damage(directory / str(step), "" if good is None else _METRICS)
        if damage:
            damaged[step] = damage
        elif good is None:
            good = step
    if good is None and damaged:
        each = "; ".join(f"{step}: {damage}" for step, damage in damaged.items())
        raise CheckpointError(
            f"every checkpoint in {directory} is damaged ({each}); move the directory away to start"
            " from step 0"
        )
    for step, damage in damaged.items():
        path = directory / str(step)
        aside = _rename_damaged(path)
        instead = f"using {directory / str(good)} instead; " if step > good else ""
        line = f"checkpoint {path} is damaged: {damage}; {instead}it is kept as {aside}"
        say(one_line(line))  # a list of files may name them with codes of terminals
    return good or 0


def describe_good(directory: Path, before: int) -> str:
    """Names the last undamaged checkpoint of a step below ``before``, for an error message."""
    for step in reversed(saved_steps(directory)):
        if step < before and find_damage(directory / str(step)) is None:
            return f"the last good checkpoint is {directory / str(step)}"
    return "there is no good checkpoint before it"


def _rename_damaged(checkpoint):
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged.{number}")
    return checkpoint.rename(aside)


def copy_checkpoint(checkpoint: Path, target: Path, *, names: Sequence[str]) -> None:
    """Copies the trees of these names, and what there is beside them, with a list of their own.

    Args:
      checkpoint: its folder; checked, see ``check_checkpoint``.
      target: the folder of the copy, which must not exist; it appears when all is written.
      names: of trees.
    """
    temporary = target.with_name(f"{target.name}.copy")
    trees = {path.parent.name for path in checkpoint.glob("*/_METADATA")}

    def left_out(folder, entries):
        return (trees - set(names)) | {MANIFEST} if Path(folder) == checkpoint else ()

    shutil.copytree(checkpoint, temporary, ignore=left_out)
    write_manifest(temporary)
    temporary.rename(target)


def _files(checkpoint):
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    return [p for p in paths if p.name not in _UNCHECKED]


def _size_and_crc(path):
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]
