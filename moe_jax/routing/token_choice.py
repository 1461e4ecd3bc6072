"""Routers in which every token takes its k best experts.

Axis legend: T tokens, E experts, k choices.
"""

import warnings

import jax
import jax.numpy as jnp

from moe_jax.routing.types import TokenChoice, check_valid


def top_k_softmax(logits: jax.Array, k: int, *, valid: jax.Array | None = None) -> TokenChoice:
    """Takes the k largest logits; the gates are the softmax over those k.

    Source: Shazeer et al. 2017 (without the noise), Mixtral. It is the same function, with the
    same gradient, as ``softmax_top_k(..., renormalize=True)``.

    Args:
      logits: float[T, E]; cast to float32. Equal logits: the lowest index wins.
      k: choices per token, 1 <= k <= E. With k = 1 the gate is the constant 1 and the router gets
        no gradient from the output, so a warning is given.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.

    Returns:
      TokenChoice with K = k. A chosen logit of -inf leaves its slot empty.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T].
    """
    logits, valid = _check(logits, k, valid)
    if k == 1:
        warnings.warn(
            "top_k_softmax with k=1: the renormalised gate is the constant 1, so the router gets no"
            " gradient through the output; use softmax_top_k(renormalize=False) (Switch).",
            stacklevel=2,
        )
    expert, chosen_logits, used = _select(logits, k, valid)
    return TokenChoice(expert, masked_softmax(chosen_logits, used), logits, _probs(logits, valid))


def softmax_top_k(
    logits: jax.Array, k: int, *, renormalize: bool = False, valid: jax.Array | None = None
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

    Returns:
      TokenChoice with K = k. A chosen logit of -inf leaves its slot empty.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T].
    """
    if renormalize:
        return top_k_softmax(logits, k, valid=valid)
    logits, valid = _check(logits, k, valid)
    expert, _, used = _select(logits, k, valid)
    probs = _probs(logits, valid)
    # An empty slot reads column 0 and throws it away: an index of E would be out of range.
    gate = jnp.take_along_axis(probs, jnp.where(used, expert, 0), axis=-1)
    return TokenChoice(expert, jnp.where(used, gate, 0.0), logits, probs)


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


def _probs(logits, valid):
    return masked_softmax(logits, valid[:, None] & (logits != -jnp.inf))


def _select(logits, k, valid):
    """The k best experts: expert i32[T, k] (E where unused), their logits, used bool[T, k]."""
    chosen_logits, expert = jax.lax.top_k(logits, k)
    used = valid[:, None] & (chosen_logits != -jnp.inf)
    return jnp.where(used, expert, logits.shape[-1]).astype(jnp.int32), chosen_logits, used


def _check(logits, k, valid):
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: got shape {logits.shape}; allowed: [T, E] with E >= 1")
    if isinstance(k, bool) or int(k) != k or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: got {k!r}; allowed: 1..{logits.shape[1]} (the number of experts)")
    return logits.astype(jnp.float32), check_valid(valid, logits.shape[0])
