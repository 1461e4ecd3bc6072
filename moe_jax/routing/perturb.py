"""Randomness of training: noisy logits, jittered inputs, experts left out.

All of it is off in evaluation, where there is no key.

Axis legend: T tokens, d width, E experts, k choices, L layers.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from moe_jax.routing.logits import linear_logits
from moe_jax.routing.losses import importance_loss, load_loss
from moe_jax.routing.router import CommonLosses, Router, Weight, mask_experts
from moe_jax.routing.token_choice import top_k_softmax
from moe_jax.routing.types import check_count, check_logits, check_number


def noisy_logits(logits: jax.Array, noise_logits: jax.Array, key: jax.Array) -> jax.Array:
    """logits + softplus(noise_logits) * N(0, 1).

    Source: Shazeer et al. 2017 (arXiv:1701.06538), eq. 4.

    Args:
      logits, noise_logits: float[T, E], computed in float32.
      key: of the noise; the same key gives the same noise.
    """
    logits = jnp.asarray(logits, jnp.float32)
    noise = jax.random.normal(key, logits.shape, jnp.float32)
    return logits + jax.nn.softplus(jnp.asarray(noise_logits, jnp.float32)) * noise


def smooth_load(logits: jax.Array, noisy: jax.Array, noise_logits: jax.Array, k: int) -> jax.Array:
    """Probability that an expert is among the k best if its own noise is drawn anew.

    The noise of the other experts stays as it is, so the threshold is the k-th best of the others.
    The sum over tokens is a load that has a gradient. Source: Shazeer et al. 2017, eqs. 8-10.

    Args:
      logits: f32[T, E] before the noise.
      noisy: f32[T, E] of ``noisy_logits``.
      noise_logits: f32[T, E], the noise has the standard deviation softplus(noise_logits).
      k: choices per token, 1 <= k <= E.

    Returns:
      f32[T, E], in [0, 1]; 1 everywhere for k = E, 0 where a logit is -inf.
    """
    logits, _ = check_logits(logits, None)
    num_experts = logits.shape[1]
    k = check_count("k", k, num_experts, "the number of experts")
    out = logits == -jnp.inf
    if k == num_experts:
        return jnp.where(out, 0.0, 1.0)
    best = jax.lax.top_k(noisy, k + 1)[0]
    kth, next_best = best[:, k - 1 : k], best[:, k:]
    # One that is in now must beat the best that is out; one that is out must beat the last inside.
    threshold = jnp.where(noisy >= kth, next_best, kth)
    reachable = threshold != -jnp.inf
    margin = jnp.where(out | ~reachable, 0.0, logits - jnp.where(reachable, threshold, 0.0))
    # Learned noise may shrink until the gradient of the quotient overflows.
    deviation = jnp.maximum(jax.nn.softplus(noise_logits), 1e-6)
    chance = jax.scipy.stats.norm.cdf(margin / deviation)
    return jnp.where(out, 0.0, jnp.where(reachable, chance, 1.0))


def input_jitter(x: jax.Array, key: jax.Array, amount: float) -> jax.Array:
    """x times uniform numbers of [1 - amount, 1 + amount], for the router alone.

    Source: Switch Transformer (Fedus et al. 2021), section 2.2; they use 0.01.

    Args:
      x: float[T, d].
      key: of the numbers.
      amount: in [0, 1); 0 gives x itself.

    Raises:
      ValueError: amount out of range.
    """
    if not 0 <= amount < 1:
        raise ValueError(f"amount: got {amount}; allowed: 0 <= number < 1")
    if amount == 0:
        return x
    factor = jax.random.uniform(key, x.shape, jnp.float32, 1.0 - amount, 1.0 + amount)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def expert_dropout(key: jax.Array, num_experts: int, rate: float, *, at_least: int) -> jax.Array:
    """A mask of experts, each left out with probability ``rate`` for all tokens of the step.

    Source: SMEAR (Muqeeth et al. 2024), section 3.2, for experts that do not rely on each other.

    Args:
      key: of the mask.
      num_experts: E.
      rate: in [0, 1).
      at_least: experts that stay in any case (k), since a token needs so many.

    Returns:
      bool[E], True for those that stay.

    Raises:
      ValueError: rate or at_least out of range.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate: got {rate}; allowed: 0 <= number < 1")
    check_count("at_least", at_least, num_experts, "the number of experts")
    luck = jax.random.uniform(key, (num_experts,))
    lucky = jax.lax.top_k(luck, at_least)[1]
    return (luck >= rate).at[lucky].set(True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyTopK(Router):
    """``top_k_softmax`` of noisy logits, the noise learned, with importance and load losses.

    Attributes:
      importance_weight, load_weight: of the losses; the paper has 0.1 for both.
    """

    importance_weight: float = 0.1
    load_weight: float = 0.1

    can_leave_out_experts: ClassVar[bool] = False  # importance and load would ask for them
    # Importance and load take the place of the load-balance loss.
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=0.0, z=0.0)

    def __post_init__(self):
        check_number("importance_weight", self.importance_weight, at_least=0)
        check_number("load_weight", self.load_weight, at_least=0)

    def weights(self, width, num_experts):
        noise = Weight((width, num_experts), jax.nn.initializers.zeros)
        return super().weights(width, num_experts) | {"noise_kernel": noise}

    def logits(self, inputs, weights, state):
        clean = super().logits(inputs, weights, state)
        if inputs.key is None:
            return clean
        return noisy_logits(clean, linear_logits(inputs.x, weights["noise_kernel"]), inputs.key)

    def choose(self, logits, inputs, weights, state):
        return top_k_softmax(logits, self.k, valid=inputs.valid, chosen=inputs.chosen)

    def losses(self, choice, inputs, weights, state):
        if inputs.key is None:
            return {}
        clean = mask_experts(linear_logits(inputs.x, weights["kernel"]), inputs.expert_mask)
        noise = linear_logits(inputs.x, weights["noise_kernel"])
        chance = smooth_load(clean, choice.logits, noise, self.k)
        importance = importance_loss(choice, valid=inputs.valid)
        load = load_loss(chance, valid=inputs.valid)
        return {
            "importance": self.importance_weight * importance,
            "load": self.load_weight * load,
        }
