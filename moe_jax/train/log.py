"""The files that a run writes of its numbers, cut back to a checkpoint when it goes on from one.

metrics.jsonl has a row of scalars per logged step and split; metrics.csv is the same as a table;
routing.npz has what grows with layers and experts; tensorboard/ has the scalars again.
"""

import csv
import json
import math
import os
import sys
from pathlib import Path

import numpy as np

from moe_jax.untrusted import load_npz, parse_json

_LARGEST = sys.float_info.max


class LogError(RuntimeError):
    """A file of numbers that cannot be read; the message is one line."""


class RunLog:
    """Writes the rows of one run; close it, or use it as a context manager.

    Rows are on disk as they come, but for routing.npz and metrics.csv, which ``flush`` writes:
    call it before a checkpoint is saved, so that no row up to a checkpoint is ever missing.

    Attributes:
      directory: of the run.
    """

    def __init__(self, directory: str | Path, *, step: int):
        """Opens the files in ``directory`` after cutting all rows of steps beyond ``step``.

        Args:
          directory: of the run; must exist.
          step: that the run goes on from, 0 for a new one.
        """
        from tensorboardX import SummaryWriter

        self.directory = Path(directory)
        self._rows = [row for row in read_metrics(directory) if row["step"] <= step]
        text = "".join(_line(row) for row in self._rows)
        _replace(self.directory / "metrics.jsonl", lambda path: path.write_text(text))
        self._file = (self.directory / "metrics.jsonl").open("a")
        self._routing = _read_routing(self.directory / "routing.npz", step)
        # TensorBoard drops what an earlier process wrote from the purge step on.
        self._board = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.close()
        except OSError:
            if error is None:  # else it is the consequence of the first error
                raise

    def write_scalars(self, step: int, split: str, scalars: dict[str, float]) -> None:
        """Adds a row; ``split`` is "train" or "validation".

        A statistic may overflow in a run whose loss is finite: what is not finite becomes null.
        """
        scalars = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        row = {"step": step, "split": split, **scalars}
        self._rows.append(row)
        self._file.write(_line(row))
        self._file.flush()
        for name, value in scalars.items():
            if value is None:
                continue
            self._board.add_scalar(f"{split}/{name}", value, step)

    def write_routing(self, step: int, load: np.ndarray, dropped: np.ndarray) -> None:
        """Adds the counts [L, E] of the training batch of ``step``.

        Raises:
          LogError: the file had those of another model.
        """
        if self._routing and self._routing[0][1].shape != np.shape(load):
            before, now = list(self._routing[0][1].shape), list(np.shape(load))
            raise LogError(
                f"{self.directory / 'routing.npz'}: has layers and experts {before}, this run has"
                f" {now}; move the file away to go on without"
            )
        self._routing.append((step, np.asarray(load, np.int32), np.asarray(dropped, np.int32)))

    def flush(self) -> None:
        """Brings everything so far to the disk."""
        os.fsync(self._file.fileno())
        self._board.flush()
        if self._routing:
            step, load, dropped = (np.stack(column) for column in zip(*self._routing, strict=True))
            arrays = dict(step=step.astype(np.int32), load=load, dropped=dropped)
            _replace(
                self.directory / "routing.npz", lambda path: np.savez_compressed(path, **arrays)
            )
        _replace(self.directory / "metrics.csv", self._write_csv)

    def close(self) -> None:
        """Flushes and closes the files."""
        self.flush()
        self._file.close()
        self._board.close()

    def _write_csv(self, path):
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns or ["step", "split"])
            writer.writeheader()
            writer.writerows(self._rows)


class NoLog:
    """What the processes that write no files have in the place of a RunLog."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        pass

    def write_scalars(self, step: int, split: str, scalars: dict[str, float]) -> None:
        """Nothing."""

    def write_routing(self, step: int, load: np.ndarray, dropped: np.ndarray) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


def read_metrics(directory: str | Path) -> list[dict]:
    """The rows of metrics.jsonl in a run's directory; a last line cut short by a kill is dropped.

    Raises:
      LogError: another line that is not a row.
    """
    path = Path(directory) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not _is_row(row):
            raise LogError(f"{path}: line {number} is damaged; move the file away")
        rows.append(row)
    return rows


def _is_row(row):
    """Whether it is what ``write_scalars`` writes."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    numbers = [value for name, value in row.items() if name != "split" and value is not None]
    if not all(type(number) in (int, float) for number in numbers):
        return False
    if not isinstance(row.get("split"), str) or not all(abs(n) <= _LARGEST for n in numbers):
        return False
    return all(text.isprintable() for text in (*row, row["split"]))  # and so, can be encoded


def _read_routing(path, step):
    if not path.exists():
        return []
    try:
        arrays = load_npz(path, ("step", "load", "dropped"))
        shapes = [array.shape for array in arrays.values()]
        kinds = [array.dtype for array in arrays.values()]
        if shapes != [shapes[1][:1], shapes[1], shapes[1]] or len(shapes[1]) != 3:
            raise ValueError(f"got arrays {shapes}")
        if kinds != [np.int32] * 3:
            raise ValueError(f"got arrays of {kinds}")
        return [row for row in zip(*arrays.values(), strict=True) if row[0] <= step]
    except ValueError:
        raise LogError(f"{path}: is damaged; move the file away to go on without") from None


def _line(row):
    return json.dumps(row, allow_nan=False) + "\n"


def _replace(path, write):
    """Writes beside ``path`` and renames: readers see the old file or the new one."""
    temporary = path.with_name(f"{path.stem}.tmp{path.suffix}")
    write(temporary)
    os.replace(temporary, path)
