"""A parent process that starts the training again when it dies of what may pass."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_jax.checkpoints import saved_steps

_LONGEST_PAUSE_SECONDS = 60
# A terminal that closes sends SIGHUP to this process alone; the child would train on without it.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_with_restarts(command: Sequence[str], workdir: Path, *, max_restarts: int) -> int:
    """Runs ``command`` until it ends by itself, or too often without a new checkpoint.

    It is started again when it died of a signal, as of the out-of-memory killer, or when it says
    that its error may pass (exit code 75). SIGINT and SIGTERM are handed to it, and are the end.

    Args:
      command: to run.
      workdir: where it saves checkpoints, or its variants do.
      max_restarts: in a row, without a newer checkpoint in between; after pauses of 1, 2, 4 and up
        to 60 seconds.

    Returns:
      The last exit code; 128 + signal for a process that died of one, as a shell has it.
    """
    child = _Child(command)
    before = {
        number: signal.signal(number, child.stop)
        for number in _STOPPING
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
    }
    try:
        restarts, newest = 0, _newest(workdir)
        while True:
            code = child.run()
            if child.stopped or not _may_pass(code):
                break
            now = _newest(workdir)
            restarts = 1 if now > newest else restarts + 1
            newest = max(newest, now)
            if restarts > max_restarts:
                break
            seconds = min(2 ** (restarts - 1), _LONGEST_PAUSE_SECONDS)
            print(
                f"the training {_describe(code)}; starting it again in {seconds:g} s"
                f" ({restarts} of {max_restarts} times without a new checkpoint)",
                file=sys.stderr,
                flush=True,
            )
            child.sleep(seconds)
            if child.stopped:
                return 128 + child.stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


class _Child:
    """The process that trains, one life after the other.

    Attributes:
      stopped: the number of the first signal to stop, None before.
    """

    def __init__(self, command):
        self._command = list(command)
        self._process = None
        self.stopped = None

    def run(self):
        """One life; its exit code, or minus the signal that it died of."""
        # In a group of its own: else it would get Ctrl-C twice, from the terminal and from here.
        self._process = subprocess.Popen(self._command, process_group=0)
        if self.stopped:  # by a signal that came before there was a process
            self._process.send_signal(self.stopped)
        return self._process.wait()

    def stop(self, number, frame):
        """The handler of signals."""
        self.stopped = self.stopped or number
        if self._process is not None:
            self._process.send_signal(number)

    def sleep(self, seconds):
        """Sleeps, or less if stopped."""
        until = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < until:
            time.sleep(0.1)


def _may_pass(code):
    killed = code < 0 and -code not in _STOPPING
    return killed or code == os.EX_TEMPFAIL


def _describe(code):
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _newest(workdir):
    """The newest steps of all runs together."""
    folders = [workdir / "checkpoints", *workdir.glob("*/checkpoints")]
    return sum(max(saved_steps(folder), default=0) for folder in folders)
