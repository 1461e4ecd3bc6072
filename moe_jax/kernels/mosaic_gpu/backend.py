"""The backend of Pallas kernels for NVIDIA Hopper."""

import functools

from moe_jax.kernels.backend import Backend
from moe_jax.kernels.mosaic_gpu import grouped, router, rows


def _backend(interpret) -> Backend:
    pieces = (
        grouped.matmul,
        grouped.hidden,
        grouped.outer,
        rows.gather,
        rows.combine,
        rows.gate_gradient,
        router.route,
    )
    return Backend("mosaic_gpu", *(functools.partial(p, interpret=interpret) for p in pieces))


BACKEND = _backend(False)


def interpreted() -> Backend:
    """The same in jax's interpreter of GPUs: memory starts as NaN, and a race is an error.

    Raises:
      NotImplementedError: when it computes, with jax before 0.11.2, which has no interpreter.
    """
    return _backend(True)
