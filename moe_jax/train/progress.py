"""What a person sees of a run: a bar on a terminal, a line now and then in a log."""

import os
import sys
import time

from tqdm import tqdm

_LOG_EVERY_SECONDS = 30.0


class Progress:
    """The progress of one run; use it as a context manager."""

    def __init__(self, *, steps: int, name: str = "", silent: bool = False):
        """A run of ``steps``; ``name`` is put before every line, of which silent shows none."""
        self._steps = steps
        self._name = name
        self._spoken = time.monotonic()
        self._silent = silent
        self._bar = None

    def start(self, step: int) -> None:
        """Starts the clock and the bar at ``step``: call it when all is compiled."""
        self._start = (step, time.monotonic())
        if not self._silent and _is_screen(sys.stderr):
            self._bar = tqdm(
                total=self._steps,
                initial=step,
                desc=self._name or None,
                unit="step",
                dynamic_ncols=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._spoken = time.monotonic()
        line = f"{self._name}: {text}" if self._name else text
        if self._silent:
            return
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows the numbers of a logged step."""
        numbers = {"loss": f"{loss:.4f}", "tokens/s": f"{tokens_per_second:,.0f}"}
        if self._bar is not None:
            self._bar.set_postfix(numbers, refresh=False)
            self.advance(step)
        elif time.monotonic() - self._spoken > _LOG_EVERY_SECONDS or step == self._steps:
            shown = ", ".join(f"{key} {value}" for key, value in numbers.items())
            self.say(f"step {step}/{self._steps}, {shown}, {self._time_left(step)} left")

    def advance(self, step: int) -> None:
        """Moves the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _time_left(self, step):
        first, began = self._start
        seconds = (time.monotonic() - began) / (step - first) * (self._steps - step)
        return tqdm.format_interval(seconds)


def _is_screen(stream):
    """Whether a bar can be shown; some pseudo-terminals are zero columns wide."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return False
