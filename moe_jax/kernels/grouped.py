"""The grouped matmul and its gradients.

Axis legend: N rows, E groups (experts), d and f the inner and outer width of the product.
"""

import functools

import jax

from moe_jax.kernels.backend import Backend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(backend: Backend, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows of lhs by its own matrix; see ``api.grouped_matmul``."""
    return backend.matmul(lhs, rhs, group_sizes)


def _matmul_fwd(backend, lhs, rhs, group_sizes):
    return matmul(backend, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _matmul_bwd(backend, residuals, cotangent):
    lhs, rhs, group_sizes = residuals
    d_lhs = backend.matmul(cotangent, rhs, group_sizes, transposed=True)
    d_rhs = backend.outer(lhs, cotangent, group_sizes, dtype=rhs.dtype)
    return d_lhs.astype(lhs.dtype), d_rhs, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)
