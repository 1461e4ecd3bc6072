"""Dispatch of routings that say for every expert what its rows are made of.

Axis legend: T tokens, E experts, C capacity, S slots per expert, G sequences of n = T/G tokens,
d width, f expert width.
"""

import jax
import jax.numpy as jnp

from moe_jax.dispatch.feed_forward import feed_forward
from moe_jax.routing import ExpertChoice, ExpertMerge, SoftChoice


def expert_choice_moe(x, routing: ExpertChoice, experts, *, activation):
    """Each token's sum over the experts that took it of gate times output.

    Args:
      x: [T, d].  experts: weights.  activation: elementwise.

    Returns:
      [T, d] of x's dtype; 0 for tokens that nobody took.
    """
    rows = x.at[routing.token].get(mode="fill", fill_value=0)
    rows = feed_forward(rows, experts, activation, jnp.matmul, lambda bias: bias[:, None])
    terms = routing.gate[..., None] * rows.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32).at[routing.token].add(terms, mode="drop")
    return y.astype(x.dtype)


def soft_moe(x, routing: SoftChoice, experts, *, activation):
    """The experts applied to mixtures of tokens, and mixed again for every token.

    Args:
      x: [T, d].  experts: weights.  activation: elementwise.

    Returns:
      [T, d] of x's dtype; 0 for tokens without weights.
    """
    dispatch, combine = routing.dispatch, routing.combine
    if dispatch.ndim == 3:
        dispatch, combine = dispatch[None], combine[None]
    groups, length, num_experts, num_slots = dispatch.shape
    sequences = x.reshape(groups, length, -1)
    # 0 * NaN is NaN, and here every token meets every slot: keep out whom no slot takes.
    there = jnp.any(dispatch > 0, axis=(2, 3))[..., None]
    rows = jnp.einsum("gnes,gnd->egsd", dispatch, jnp.where(there, sequences, 0))
    rows = rows.astype(x.dtype).reshape(num_experts, groups * num_slots, -1)
    rows = feed_forward(rows, experts, activation, jnp.matmul, lambda bias: bias[:, None])
    rows = rows.reshape(num_experts, groups, num_slots, -1)
    y = jnp.einsum("gnes,egsd->gnd", combine, rows.astype(jnp.float32))
    return y.reshape(x.shape).astype(x.dtype)


def merged_moe(x, routing: ExpertMerge, experts, *, activation):
    """Every sequence through one expert, whose parameters are the weighted mean of all.

    Args:
      x: [T, d].  experts: weights.  activation: elementwise.

    Returns:
      [T, d] of x's dtype; 0 for invalid tokens.
    """
    groups = routing.weight.shape[0]

    def merge(array):
        merged = jnp.tensordot(routing.weight, array.astype(jnp.float32), 1)
        return merged.astype(array.dtype)

    merged = jax.tree.map(merge, experts)
    rows = jnp.where(routing.valid[:, None], x, 0).reshape(groups, -1, x.shape[1])
    y = feed_forward(rows, merged, activation, jnp.matmul, lambda bias: bias[:, None])
    return jnp.where(routing.valid[:, None], y.reshape(x.shape), 0)
