"""Stopping on request: SIGINT (Ctrl-C) and SIGTERM end a run after the step at hand."""

import os
import signal
import sys

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within its ``with`` block, notes the first SIGINT or SIGTERM; a second one exits at once.

    Attributes:
      signal: the number of the signal that came, None before.
    """

    def __init__(self):
        self.signal: int | None = None

    def __enter__(self):
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind, error, traceback):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + signal, as a shell has it for a program that died of the signal; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    def _note(self, number, frame):
        if self.signal is not None:
            os._exit(128 + number)  # not sys.exit: threads that write would be waited for
        self.signal = number
        name = signal.Signals(number).name
        message = f"\n{name}: stopping after this step and saving; a second one exits at once\n"
        os.write(sys.stderr.fileno(), message.encode())
