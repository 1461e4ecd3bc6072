"""Auxiliary losses of a router.

Every loss is a mean over the valid tokens of what it is given, so a loss over the global batch is
the loss of the global arrays; a mean of the losses of parts is a different number. For several
layers, take the loss of each and then the mean: joining the layers first hides a collapse that
differs from layer to layer.

Axis legend: T tokens, E experts, k choices, K slots.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from moe_jax.routing.types import TokenChoice, check_valid, expert_counts


def load_balance_loss(
    routing: TokenChoice,
    *,
    valid: jax.Array | None = None,
    per: Literal["assignment", "token"] = "assignment",
) -> jax.Array:
    """E * sum_i f_i P_i: the share f of the load times the mean probability P of each expert.

    Source: Switch Transformer eq. 4, with f = counts / (kT), so that perfect balance gives 1 for
    every k. f is not differentiated; the gradient reaches the router through P.

    Args:
      routing: of one layer; probs is the softmax over all experts.
      valid: bool[T], the tokens that count in f and P. None: those that hold any expert or
        probability count, which is all of them unless the router was given ``valid``.
      per: what f counts per: "assignment", f = counts / (kT), or "token", f = counts / T as in
        Mixtral's published code (k times as large).

    Returns:
      f32[]; 1 at perfect balance ("assignment"), E when everything goes to one expert with
      certainty, 0 without any valid token.

    Raises:
      ValueError: unknown ``per``, or ``valid`` not [T].
    """
    num_experts = routing.probs.shape[-1]
    if valid is None:
        valid = jnp.any(routing.probs != 0, axis=-1)
    valid = check_valid(valid, routing.probs.shape[0])
    tokens = jnp.maximum(jnp.sum(valid), 1)
    counts = expert_counts(jnp.where(valid[:, None], routing.expert, num_experts), num_experts)
    if per == "assignment":
        total = jnp.maximum(jnp.sum(counts), 1)  # kT, unless some slots are empty
    elif per == "token":
        total = tokens
    else:
        raise ValueError(f"per: got {per!r}; allowed: 'assignment', 'token'")
    fraction = jax.lax.stop_gradient(counts / total)
    importance = jnp.sum(jnp.where(valid[:, None], routing.probs, 0.0), axis=0) / tokens
    return num_experts * jnp.sum(fraction * importance)


def z_loss(logits: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
    """Mean over valid tokens of logsumexp(logits)^2, which keeps router logits small.

    Source: ST-MoE (Zoph et al. 2022), eq. 5.

    Args:
      logits: float[T, E]; computed in float32.
      valid: bool[T]. None: all.

    Returns:
      f32[]; 0 without any valid token. A row of -inf only counts as 0.

    Raises:
      ValueError: logits not [T, E], or ``valid`` not [T].
    """
    logits = jnp.asarray(logits, jnp.float32)
    if logits.ndim != 2:
        raise ValueError(f"logits: got shape {logits.shape}; allowed: [T, E]")
    counted = jnp.any(logits != -jnp.inf, axis=-1)
    valid = check_valid(valid, logits.shape[0])
    # Replaced before logsumexp too: its gradient on a row of -inf is NaN, and NaN * 0 is NaN.
    z = jax.nn.logsumexp(jnp.where((counted & valid)[:, None], logits, 0.0), axis=-1)
    z = jnp.where(counted & valid, z, 0.0)
    return jnp.sum(z * z) / jnp.maximum(jnp.sum(valid), 1)
