"""A trace of a few steps, which shows what a step's time goes into."""

import contextlib
from pathlib import Path

import jax

# The first steps of a process are not like the others.
_SKIPPED_STEPS = 5
_TRACED_STEPS = 5


class StepTrace:
    """Has jax's profiler watch some steps of a process; close it, also after an error."""

    def __init__(self, directory: Path | None):
        """Into ``directory``; None: nothing is traced."""
        self._directory = directory
        self._made = 0
        self._running = False

    @contextlib.contextmanager
    def watch(self, step: int):
        """Within it, step number ``step`` is started."""
        if self._directory is None:
            yield
            return
        if self._made == _SKIPPED_STEPS:
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        self._made += 1

    def is_complete(self) -> bool:
        """Whether the last step to be traced has been started; it is to be waited for, then."""
        return self._running and self._made >= _SKIPPED_STEPS + _TRACED_STEPS

    def close(self) -> str | None:
        """Writes the trace, if one is running; where it is, in a line."""
        if not self._running:
            return None
        directory, self._directory = self._directory, None
        self._running = False
        jax.profiler.stop_trace()
        steps = self._made - _SKIPPED_STEPS
        return f"trace of {steps} steps in {directory}: for ui.perfetto.dev or TensorBoard"
