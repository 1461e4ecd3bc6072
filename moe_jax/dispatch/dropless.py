"""Rows sorted by expert and multiplied group by group: no padding to a capacity, nobody dropped.

Axis legend: T tokens, K slots, E experts, d width, f expert width.
"""

import jax.numpy as jnp

from moe_jax.dispatch.feed_forward import feed_forward
from moe_jax.dispatch.rows import assignment_of_row, from_rows, to_rows
from moe_jax.kernels import grouped_matmul
from moe_jax.routing import expert_counts


def dropless_moe(x, expert, gate, position, experts, *, capacity, activation):
    """Sum over slots of gate times expert output; see ``moe`` for the arguments.

    Args:
      x: [T, d].  expert: i32[T, K].  gate: f32[T, K].  position: i32[T, K].
      experts: weights.  activation: elementwise.
      capacity: not needed, since the rows of an expert are as many as its assignments.

    Returns:
      [T, d] of x's dtype.
    """
    del capacity
    num_experts = experts["w_in"].shape[0]
    sizes = expert_counts(expert, num_experts)
    start = jnp.cumsum(sizes) - sizes
    row = jnp.where(expert < num_experts, start[expert] + position, expert.size)
    assignment = assignment_of_row(row, expert.size)

    def matmul(rows, weight):
        return grouped_matmul(rows, weight, sizes)

    def bias(weight):
        expert_of_row = expert.ravel()[jnp.minimum(assignment, expert.size - 1)]
        return weight[jnp.minimum(expert_of_row, num_experts - 1)]

    rows = to_rows(x, row, assignment)
    rows = feed_forward(rows, experts, activation, matmul, bias)
    return from_rows(rows, gate, row, assignment)
