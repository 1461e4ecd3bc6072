"""Routers in which every token takes its k best experts.

Axis legend: T tokens, E experts, k choices.
"""

import warnings

import jax
import jax.numpy as jnp

from moe_jax.routing.types import (
    ConstantGateWarning,
    TokenChoice,
    check_chosen,
    check_count,
    check_logits,
)


def top_k_softmax(
    logits: jax.Array,
    k: int,
    *,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Takes the k largest logits; the gates are the softmax over those k.

    Source: Shazeer et al. 2017 (without the noise), Mixtral. It is the same function, with the
    same gradient, as ``softmax_top_k(..., renormalize=True)``.

    Args:
      logits: float[T, E]; cast to float32. Equal logits: the lowest index wins.
      k: choices per token, 1 <= k <= E. With k = 1 the gate is the constant 1 and the router gets
        no gradient from the output, so a warning is given.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead of the k best (E: empty slot).

    Returns:
      TokenChoice with K = k. A chosen logit of -inf leaves its slot empty.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    if k == 1:
        warnings.warn(
            "top_k_softmax with k=1: the renormalised gate is the constant 1, so the router gets no"
            " gradient through the output; use softmax_top_k(renormalize=False) (Switch).",
            ConstantGateWarning,
            stacklevel=2,
        )
    expert, used = select(logits, k, valid, chosen)
    gate = masked_softmax(take(logits, expert), used)
    return TokenChoice(expert, gate, logits, router_probs(logits, valid))


def softmax_top_k(
    logits: jax.Array,
    k: int,
    *,
    renormalize: bool = False,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Takes the k largest router probabilities; the gates are those probabilities.

    Source: Switch Transformer (k = 1), DeepSeek-V2 (``renormalize=False``), Qwen3-MoE
    (``norm_topk_prob=True`` is ``renormalize=True``).

    Args:
      logits: float[T, E]; cast to float32. Selection is by logit, since probabilities of far
        logits underflow to ties. Equal logits: the lowest index wins.
      k: choices per token, 1 <= k <= E.
      renormalize: divide the k gates by their sum. With k = 1 that makes the gate the constant 1
        and the router gets no gradient from the output, so a warning is given.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead of the k best (E: empty slot).

    Returns:
      TokenChoice with K = k. A chosen logit of -inf leaves its slot empty.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T].
    """
    if renormalize:
        return top_k_softmax(logits, k, valid=valid, chosen=chosen)
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    expert, used = select(logits, k, valid, chosen)
    probs = router_probs(logits, valid)
    return TokenChoice(expert, jnp.where(used, take(probs, expert), 0.0), logits, probs)


def select(
    scores: jax.Array, k: int, valid: jax.Array, chosen: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k best experts of each token.

    Args:
      scores: f32[T, E]; the highest win, equal ones by lowest index. -inf: never chosen.
      k: how many.
      valid: bool[T].
      chosen: i32[T, K], taken instead where given, as far as their scores are not -inf.

    Returns:
      expert i32[T, K], E where the slot is empty, and used bool[T, K], where it is not.
    """
    num_tokens, num_experts = scores.shape
    chosen = best(scores, k) if chosen is None else check_chosen(chosen, num_tokens, "token")
    inside = (chosen >= 0) & (chosen < num_experts)
    used = inside & (take(scores, chosen) != -jnp.inf) & valid[:, None]
    return jnp.where(used, chosen, num_experts).astype(jnp.int32), used


def best(scores: jax.Array, k: int) -> jax.Array:
    """Indices i32[..., k] of the k largest of the last axis; equal ones by lowest index."""
    # top_k puts 0.0 before -0.0, which are equal.
    return jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), k)[1]


def take(values: jax.Array, expert: jax.Array) -> jax.Array:
    """values [T, E] of the experts i32[T, K]; of an empty slot that of the last expert."""
    # An index of E would be out of range; what it reads is thrown away by all callers.
    return jnp.take_along_axis(values, jnp.clip(expert, 0, values.shape[1] - 1), axis=-1)


def masked_softmax(logits: jax.Array, where: jax.Array) -> jax.Array:
    """Softmax over the last axis of the entries marked ``where``; 0 elsewhere.

    A row without any marked entry gives zeros, with zero gradient. NaN stays NaN.
    """
    highest = jnp.max(jnp.where(where, logits, -jnp.inf), axis=-1, keepdims=True)
    highest = jax.lax.stop_gradient(jnp.where(highest == -jnp.inf, 0.0, highest))
    # Masked before exp as well as after: exp of a masked +-1e4 or -inf must not reach the gradient.
    weight = jnp.where(where, jnp.exp(jnp.where(where, logits, highest) - highest), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return weight / jnp.where(total == 0.0, 1.0, total)


def router_probs(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Softmax over all experts whose logit is not -inf: f32[T, E]; 0 for invalid tokens."""
    return masked_softmax(logits, valid[:, None] & (logits != -jnp.inf))
