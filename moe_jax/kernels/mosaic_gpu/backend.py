"""The backend of Pallas kernels for NVIDIA Hopper."""

import functools

import jax

from moe_jax.kernels.backend import Backend, of_kernels
from moe_jax.kernels.mosaic_gpu import grouped, router, rows


def _make(interpret):
    backend = of_kernels("mosaic_gpu", grouped, rows, router, interpret)
    pieces = ("matmul", "hidden", "outer", "gather", "combine", "gate_gradient", "route")
    pieces = {name: _unchecked(getattr(backend, name)) for name in pieces}
    return backend._replace(typed=False, **pieces)


def _unchecked(piece):
    """The piece, where jax does not check over which axes of a mesh a value varies.

    The loops of a kernel begin with constants, which vary over none, and jax takes that for an
    error in a kernel for GPUs.
    """

    @functools.wraps(piece)
    def call(*arguments, **keywords):
        for leaf in jax.tree.leaves((arguments, keywords)):
            if isinstance(leaf, jax.Array) and jax.typeof(leaf).mat.varying:
                raise NotImplementedError(
                    "mosaic_gpu inside jax.shard_map: got check_vma=True; allowed: False"
                )
        return piece(*arguments, **keywords)

    return call


BACKEND = _make(False)


def interpreted() -> Backend:
    """The same in jax's interpreter of GPUs: memory starts as NaN, and a race is an error.

    Raises:
      NotImplementedError: when it computes, with jax before 0.11.2, which has no interpreter.
    """
    return _make(True)
