"""The backend of Pallas kernels for NVIDIA Hopper."""

from moe_jax.kernels.backend import Backend, of_kernels
from moe_jax.kernels.mosaic_gpu import grouped, router, rows

BACKEND = of_kernels("mosaic_gpu", grouped, rows, router, False)


def interpreted() -> Backend:
    """The same in jax's interpreter of GPUs: memory starts as NaN, and a race is an error.

    Raises:
      NotImplementedError: when it computes, with jax before 0.11.2, which has no interpreter.
    """
    return of_kernels("mosaic_gpu", grouped, rows, router, True)
