"""Several processes as one run: how they find each other, and what they agree on.

All processes run the same command and compute the same; the first one alone writes what is written
once (config.json, the numbers, the lines on the screen), and checkpoints are written by all.
"""

import re
import signal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.config import ConfigError
from moe_jax.train.flags import Cluster
from moe_jax.train.signals import StopRequest

# What XLA's collectives and jax's coordination service say of it.
_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|heartbeat|Connection (reset|closed)", re.I)


def connect(cluster: Cluster | None) -> None:
    """Joins the other processes; before anything else asks jax for its devices.

    Raises:
      ConfigError: the environment does not tell, or the others do not come.
    """
    if cluster is None:
        return
    try:
        jax.distributed.initialize(*cluster)
    except (RuntimeError, ValueError) as error:
        name = "--distributed" if cluster.coordinator is None else "--coordinator"
        raise ConfigError(f"{name}: the processes did not meet: {one_line(error)}") from None


def is_first() -> bool:
    """Whether this process is the one that writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(place: str) -> None:
    """Waits until every process has come to ``place``."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(place)


def is_lost(error: BaseException) -> bool:
    """Whether the error says that another process of the run does not answer any more.

    Where no error comes, as from a collective of GPUs, jax ends this process with SIGABRT once the
    other one has been silent for a time.
    """
    return jax.process_count() > 1 and bool(_LOST.search(str(error)))


def one_line(error: BaseException) -> str:
    """The start of the error's message, without line breaks."""
    return " ".join(str(error).split())[:300]


class SharedStop:
    """A stop request of one process as one of all of them, at the same step.

    The answer is one step old, so that no step waits for another process to be asked.
    """

    def __init__(self, stop: StopRequest, mesh: Mesh | None):
        self._stop = stop
        self._mesh = mesh if jax.process_count() > 1 else None
        self._answer = None
        if self._mesh is not None:
            whole = NamedSharding(mesh, PartitionSpec())
            self._any = jax.jit(jax.numpy.any, out_shardings=whole)

    def __call__(self) -> bool:
        """Whether to stop now; every process calls it once a step, and hears the same."""
        if self._mesh is None:
            return self._stop.signal is not None
        before, self._answer = self._answer, self._ask()
        if before is None or not bool(before):
            return False
        if self._stop.signal is None:  # it came to another process
            self._stop.signal = signal.SIGTERM
        return True

    def _ask(self):
        over = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        mine = np.array([self._stop.signal is not None])
        asked = jax.make_array_from_callback((self._mesh.size,), over, lambda index: mine)
        return self._any(asked)
