"""Fixed capacity: every expert gets C rows, filled by gathers; no T*E*C array.

Axis legend: T tokens, K slots, E experts, C capacity, d width, f expert width.
"""

import jax.numpy as jnp

from moe_jax.dispatch.feed_forward import feed_forward
from moe_jax.kernels.backend import check_index
from moe_jax.kernels.manual import vary_alike
from moe_jax.kernels.rows import assignment_of_row, from_rows, to_rows


def sorted_moe(x, expert, gate, position, experts, *, capacity, activation, backend):
    """Sum over slots of gate times expert output; see ``moe`` for the arguments.

    Args:
      x: [T, d].  expert: i32[T, K].  gate: f32[T, K].  position: i32[T, K].
      experts: weights.  capacity: C; the work is that of E*C rows.  activation: elementwise.
      backend: a Backend; it moves the rows, and the products are XLA's.

    Returns:
      [T, d] of x's dtype.
    """
    num_experts, width, _ = experts["w_in"].shape
    num_rows = num_experts * capacity
    check_index(num_rows, "expert rows E*C")
    row = jnp.where(expert < num_experts, expert * capacity + position, num_rows)
    assignment = assignment_of_row(row, num_rows)
    x, gate, experts, row, assignment = vary_alike(x, gate, experts, row, assignment)

    rows = to_rows(backend, x, row, assignment).reshape(num_experts, capacity, width)
    rows = feed_forward(rows, experts, activation, jnp.matmul, lambda bias: bias[:, None])
    return from_rows(backend, rows.reshape(num_rows, width), gate, row, assignment)
