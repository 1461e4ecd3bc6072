"""What a router returns.

Axis legend (used in every module of the package):
  T  tokens        d  model width      E  experts       k  choices per token
  K  slots per token (K >= k)          C  capacity      f  expert width
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenChoice(NamedTuple):
    """Each token's chosen experts and their weights.

    A slot that holds nobody (an invalid token, a logit of -inf, a dropped assignment) has
    ``expert == E`` and ``gate == 0`` exactly. Slots are sorted by falling logit.

    Attributes:
      expert: i32[T, K], in [0, E]; E marks an empty slot.
      gate: f32[T, K], finite and >= 0; the weight of the expert's output.
      logits: f32[T, E], the router logits that were routed on.
      probs: f32[T, E], softmax of the logits over all experts; 0 for invalid tokens.
    """

    expert: jax.Array
    gate: jax.Array
    logits: jax.Array
    probs: jax.Array


def expert_counts(expert: jax.Array, num_experts: int) -> jax.Array:
    """Number of assignments per expert: i32[E] from expert i32[...], empty slots not counted."""
    counts = jnp.zeros(num_experts, jnp.int32)
    return counts.at[jnp.ravel(expert)].add(1, mode="drop")
