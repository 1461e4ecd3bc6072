"""Dispatch by one-hot einsums, as GShard and Switch do it: the clear one.

It holds two arrays of T*E*C, so it is for small groups, for GSPMD and as the reference.

Axis legend: T tokens, K slots, E experts, C capacity, d width, f expert width.
"""

import jax
import jax.numpy as jnp

from moe_jax.dispatch.feed_forward import feed_forward


def einsum_moe(x, expert, gate, position, experts, *, capacity, activation, backend):
    """Sum over slots of gate times expert output; see ``moe`` for the arguments.

    Args:
      x: [T, d].  expert: i32[T, K].  gate: f32[T, K].  position: i32[T, K].
      experts: weights.  capacity: C.  activation: elementwise.
      backend: not needed, since everything is einsums.

    Returns:
      [T, d] of x's dtype.
    """
    del backend
    num_experts = experts["w_in"].shape[0]
    to_expert = jax.nn.one_hot(expert, num_experts, dtype=gate.dtype)  # [T, K, E]; 0 when empty
    to_position = jax.nn.one_hot(position, capacity, dtype=gate.dtype)  # [T, K, C]; 0 from C on
    dispatch = jnp.einsum("tke,tkc->tec", to_expert, to_position).astype(x.dtype)
    combine = jnp.einsum("tk,tke,tkc->tec", gate, to_expert, to_position)

    # 0 * NaN is NaN, and here every token meets every row: keep out whom no expert takes.
    taken = jnp.any(expert < num_experts, axis=1)
    rows = jnp.einsum("tec,td->ecd", dispatch, jnp.where(taken[:, None], x, 0))
    rows = feed_forward(rows, experts, activation, jnp.matmul, lambda bias: bias[:, None])
    y = jnp.einsum("tec,ecd->td", combine, rows, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
