"""The backend of Pallas kernels for TPU."""

from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels.backend import Backend, of_kernels
from moe_jax.kernels.pallas_tpu import grouped, router, rows

BACKEND = of_kernels("pallas_tpu", grouped, rows, router, False)


def interpreted() -> Backend:
    """The same in the interpreter of a TPU: memory starts as NaN, and races are looked for."""
    how = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    return of_kernels("pallas_tpu", grouped, rows, router, how)
