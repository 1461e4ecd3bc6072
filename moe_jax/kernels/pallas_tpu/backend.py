"""The backend of Pallas kernels for TPU."""

import functools

from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels.backend import Backend
from moe_jax.kernels.pallas_tpu import grouped, router, rows


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
    return Backend("pallas_tpu", *(functools.partial(p, interpret=interpret) for p in pieces))


BACKEND = _backend(False)


def interpreted() -> Backend:
    """The same in the interpreter of a TPU: memory starts as NaN, and races are looked for."""
    return _backend(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))
