"""Batches from a thread of their own: a wait for one is told of, can be stopped, and ends."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_POLL_SECONDS = 0.01
_SAY_EVERY_SECONDS = 30.0


class DataError(RuntimeError):
    """Data that does not come or cannot be read, and may be there another time; one line."""


class Feed:
    """Hands out the batches of an iterator, the next of which is read meanwhile.

    The thread that reads is a daemon: one that hangs for ever does not keep the process alive.

    Attributes:
      idle_seconds: in which the device had nothing to do, as the next batch had not come.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        source: str,
        timeout_seconds: float,
        say: Callable[[str], None],
    ):
        """Starts to read.

        Args:
          batches: endless.
          source: what they are of, for messages.
          timeout_seconds: the longest wait for a batch; 0: no limit.
          say: is told now and then of a long wait.
        """
        self._batches = batches
        self._source = source
        self._timeout_seconds = timeout_seconds
        self._say = say
        self._wanted = queue.SimpleQueue()
        self._read = queue.SimpleQueue()
        self.idle_seconds = 0.0
        threading.Thread(target=self._run, daemon=True).start()
        self._wanted.put(True)

    def next(
        self, *, stopped: Callable[[], bool], busy: Callable[[], bool], step: int
    ) -> Any | None:
        """The next batch; None if the run was ``stopped`` while waiting for it.

        Args:
          stopped: whether to give up.
          busy: whether the device still works on the step before.
          step: that the batch is for.

        Raises:
          DataError: it did not come in time, or could not be read.
        """
        began = said = now = time.perf_counter()
        while True:
            idle = not busy()
            try:
                found = self._read.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                found = None
            finally:
                before, now = now, time.perf_counter()
                self.idle_seconds += idle * (now - before)
            if stopped():
                return None
            if self._timeout_seconds and now - began > self._timeout_seconds:
                raise DataError(
                    f"step {step}: no batch of {self._source} in {self._timeout_seconds:g} s"
                    " (data.timeout_seconds)"
                )
            if now - said > _SAY_EVERY_SECONDS:
                said = now
                self._say(f"waiting for data since {now - began:.0f} s")
        if isinstance(found, (OSError, ValueError)):
            reason = " ".join(str(found).split())
            raise DataError(f"step {step}: {self._source} cannot be read: {reason}") from found
        if isinstance(found, BaseException):
            raise found
        self._wanted.put(True)
        return found

    def close(self) -> None:
        """Ends the thread, as soon as it has read what it is at."""
        self._wanted.put(False)

    def _run(self):
        while self._wanted.get():
            try:
                self._read.put(next(self._batches))
            except BaseException as error:  # raised where the batch is waited for
                self._read.put(error)
                return
