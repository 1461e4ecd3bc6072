"""Backends made of somebody else's ragged dot: XLA's own, and tokamax's kernels where installed.

Epilogues are left to XLA, which fuses them with whatever comes next; rows move as XLA moves them.

Axis legend: see ``moe_jax.kernels.backend``.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp

from moe_jax.kernels import xla_rows
from moe_jax.kernels.backend import Backend, in_some_group

# tokamax's kernel for TPU takes no less.
_FEWEST_ROWS = 128


def _matmul(ragged_dot, lhs, rhs, group_sizes, *, transposed=False, bias=None, scale=None):
    rhs = (jnp.swapaxes(rhs, 1, 2) if transposed else rhs).astype(lhs.dtype)
    inside = in_some_group(group_sizes, lhs.shape[0])
    # Nothing is promised of rows past the sum, so nothing may be in them nor come out of them.
    out = ragged_dot(jnp.where(inside, lhs, 0), rhs, group_sizes)
    if bias is not None:
        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right")
        out += bias[jnp.minimum(group, bias.shape[0] - 1)]
    if scale is not None:
        out = out * scale[:, None]
    return jnp.where(inside, out, 0).astype(lhs.dtype)


def _hidden(ragged_dot, lhs, w_in, w_gate, bias, group_sizes, activation):
    u = _matmul(ragged_dot, lhs, w_in, group_sizes, bias=bias)
    v = None if w_gate is None else _matmul(ragged_dot, lhs, w_gate, group_sizes)
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    h = activation((u if v is None else v).astype(wide))
    h = h if v is None else h * u
    return jnp.where(in_some_group(group_sizes, lhs.shape[0]), h, 0).astype(lhs.dtype), u, v


def _outer(ragged_dot, lhs, rhs, group_sizes, *, scale=None, dtype):
    lhs = lhs if scale is None else (lhs * scale[:, None]).astype(lhs.dtype)
    inside = in_some_group(group_sizes, lhs.shape[0])
    lhs, rhs = jnp.where(inside, lhs, 0), jnp.where(inside, rhs, 0).astype(lhs.dtype)
    # The transpose of the product; it does not depend on the matrices, which are never read.
    matrices = jnp.zeros((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), lhs.dtype)
    _, pull = jax.vjp(lambda matrices: ragged_dot(lhs, matrices, group_sizes), matrices)
    (d_matrices,) = pull(rhs)
    return jnp.where((group_sizes > 0)[:, None, None], d_matrices, 0).astype(dtype)


def _backend(name, ragged_dot):
    return Backend(
        name,
        functools.partial(_matmul, ragged_dot),
        functools.partial(_hidden, ragged_dot),
        functools.partial(_outer, ragged_dot),
        xla_rows.gather,
        xla_rows.combine,
        xla_rows.gate_gradient,
        xla_rows.route,
    )


def tokamax_ragged_dot(lhs, rhs, group_sizes, *, implementation):
    """tokamax's product; NotImplementedError where ``implementation`` does not take the shapes."""
    import tokamax

    num_rows = lhs.shape[0]
    lhs = jnp.pad(lhs, ((0, max(0, _FEWEST_ROWS - num_rows)), (0, 0)))
    out = tokamax.ragged_dot(lhs, rhs, group_sizes, implementation=implementation)
    return out[:num_rows]


def _tokamax(implementation):
    product = functools.partial(tokamax_ragged_dot, implementation=implementation)
    return _backend("tokamax", product)._replace(typed=False)


def has_tokamax() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("tokamax") is not None


XLA = _backend("xla_ragged", jax.lax.ragged_dot)
TOKAMAX = _tokamax("mosaic")
# The same on CPU, where tokamax has no kernel: for tests of what stands around the product.
TOKAMAX_ON_CPU = _tokamax("xla")
