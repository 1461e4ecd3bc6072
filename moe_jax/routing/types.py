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
      gate: f32[T, K], >= 0; the weight of the expert's output. NaN only where the logits are NaN or
        +inf, so that a broken router does not go unseen.
      logits: f32[T, E], the router logits that were routed on.
      probs: f32[T, E], softmax of the logits over all experts; 0 for invalid tokens.
    """

    expert: jax.Array
    gate: jax.Array
    logits: jax.Array
    probs: jax.Array


def check_valid(valid: jax.Array | None, num_tokens: int) -> jax.Array:
    """``valid`` as bool[T]; all True for None.

    Raises:
      ValueError: another shape than [T].
    """
    if valid is None:
        return jnp.ones(num_tokens, bool)
    valid = jnp.asarray(valid)
    if valid.shape != (num_tokens,):
        raise ValueError(f"valid: got shape {valid.shape}; allowed: {(num_tokens,)}, as tokens")
    return valid.astype(bool)


def expert_counts(expert: jax.Array, num_experts: int) -> jax.Array:
    """Number of assignments per expert: i32[E] from expert i32[...], empty slots not counted."""
    counts = jnp.zeros(num_experts, jnp.int32)
    return counts.at[jnp.ravel(expert)].add(1, mode="drop")
