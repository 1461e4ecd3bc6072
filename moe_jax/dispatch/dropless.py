"""Rows sorted by expert and multiplied group by group: no padding to a capacity, nobody dropped.

Axis legend: T tokens, K slots, E experts, d width, f expert width.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from moe_jax.dispatch.feed_forward import feed_forward
from moe_jax.kernels.experts import dropless_experts
from moe_jax.kernels.grouped import matmul
from moe_jax.kernels.manual import vary_alike
from moe_jax.kernels.rows import assignment_of_row, from_rows, to_rows
from moe_jax.routing import expert_counts


def dropless_moe(x, expert, gate, position, experts, *, capacity, activation, backend):
    """Sum over slots of gate times expert output; see ``moe`` for the arguments.

    Args:
      x: [T, d].  expert: i32[T, K].  gate: f32[T, K].  position: i32[T, K].
      experts: weights.  activation: elementwise.  backend: a Backend.
      capacity: not needed, since the rows of an expert are as many as its assignments.

    Returns:
      [T, d] of the dtype that x and the weights promote to.
    """
    del capacity
    if expert.size == 0:
        return jnp.zeros_like(x)
    dtype = jnp.result_type(x, *experts.values())
    x, experts = x.astype(dtype), {name: weight.astype(dtype) for name, weight in experts.items()}
    num_experts = experts["w_in"].shape[0]
    sizes = expert_counts(expert, num_experts)
    start = jnp.cumsum(sizes) - sizes
    # Past the end of every buffer, also of one with slack.
    nowhere = jnp.iinfo(jnp.int32).max
    row = jnp.where(expert < num_experts, start[expert] + position, nowhere)
    assignment = assignment_of_row(row, expert.size)
    if not isinstance(activation, Hashable):
        activation = functools.partial(activation)
    arrays = vary_alike(x, gate, experts, row, assignment, sizes)
    if not _closes_over_tracers(activation):
        return dropless_experts(backend, activation, *arrays)
    x, gate, experts, row, assignment, sizes = arrays

    # The gradient of an activation that, say, learns something is left to jax.
    def bias(weight):
        expert_of_row = expert.ravel()[jnp.minimum(assignment, expert.size - 1)]
        return weight[jnp.minimum(expert_of_row, num_experts - 1)]

    rows = to_rows(backend, x, row, assignment)
    rows = feed_forward(
        rows, experts, activation, lambda rows, weight: matmul(backend, rows, weight, sizes), bias
    )
    return from_rows(backend, rows, gate, row, assignment)


def _closes_over_tracers(activation):
    """Whether it uses something beside its argument that is being traced or differentiated."""
    closed = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct((1, 1), jnp.float32))
    return any(isinstance(const, jax.core.Tracer) for const in closed.consts)
