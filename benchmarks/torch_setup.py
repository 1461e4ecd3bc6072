"""Whether torch and transformers are here, and how they are run. Does not import jax."""

import importlib.util
import os


def missing() -> str:
    """Which of the two libraries is not installed; "" if both are."""
    names = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return ", ".join(names)


def prepare() -> int:
    """Gives torch the cores that XLA takes, those this process may use; returns how many."""
    # Some implementations are fetched from a server when asked for; a measurement fetches nothing.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(cores())
    return torch.get_num_threads()


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
