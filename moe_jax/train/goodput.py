"""Where the time of a run goes, over all the processes that had a part in it."""

import contextlib
import json
import time
from pathlib import Path

from moe_jax.data.cache import atomic_write
from moe_jax.untrusted import parse_json

PARTS = ("training", "preparing", "compiling", "validation", "saving", "data")

_LONGEST_SECONDS = 1e12  # more than any run has taken; NaN and infinity are beyond it


class Goodput:
    """Measures the parts of a run and keeps them in ``summary.json``.

    ``seconds`` there has those up to the last ``write``: what a process did after it and lost by
    being killed is not in it. ``training`` is what is left of a process's time beside the others;
    ``data`` is the time in which the device waited for a batch.
    """

    def __init__(self, directory: Path, *, writes: bool = True):
        """Starts the clock; a summary in ``directory`` is gone on with, as that of a restart.

        Args:
          directory: of the run.
          writes: this process writes the summary; one of several does.
        """
        self._path = directory / "summary.json"
        self._writes = writes
        self._began = time.perf_counter()
        self._before, self._restarts = _read(self._path)
        self._parts = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def spent(self, part: str):
        """What is done within counts for ``part``, one of PARTS."""
        began = time.perf_counter()
        yield
        self._parts[part] += time.perf_counter() - began

    def prepared(self) -> None:
        """All up to now that was not ``compiling`` was ``preparing``."""
        elapsed = time.perf_counter() - self._began
        self._parts["preparing"] = elapsed - self._parts["compiling"]

    def write(self, step: int, idle_seconds: float = 0.0) -> dict[str, float]:
        """Writes the summary after ``step``, and returns the seconds by part.

        Args:
          step: the last one made.
          idle_seconds: in which the device of this process waited for data.
        """
        parts = self._parts | {"data": idle_seconds, "training": 0.0}
        elapsed = time.perf_counter() - self._began
        parts["training"] = max(elapsed - sum(parts.values()), 0.0)
        seconds = {part: self._before[part] + parts[part] for part in PARTS}
        if not self._writes:
            return seconds
        shown = {part: round(value, 3) for part, value in seconds.items()}
        summary = {"step": step, "restarts": self._restarts, "seconds": shown}
        with atomic_write(self._path) as file:
            file.write((json.dumps(summary, indent=2) + "\n").encode())
        return seconds


def describe(seconds: dict[str, float]) -> str:
    """Such as "120 s: training 88 %, compiling 12 %", without parts that round to nothing."""
    total = sum(seconds.values())
    shares = {part: round(100 * value / total) for part, value in seconds.items()}
    shown = ", ".join(f"{part} {share} %" for part, share in shares.items() if share)
    return f"{total:.0f} s: {shown}"


def _read(path):
    """Seconds by part and the number of restarts, this process's own included."""
    try:
        summary = parse_json(path.read_bytes())
        seconds = {part: float(summary["seconds"][part]) for part in PARTS}
        if not all(0 <= value < _LONGEST_SECONDS for value in seconds.values()):
            raise ValueError("no time of a run")
        return seconds, int(summary["restarts"]) + 1
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # none yet, or none of ours
        return dict.fromkeys(PARTS, 0.0), 0
