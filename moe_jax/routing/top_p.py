"""Threshold routing: as many experts as it takes to reach a given probability.

Axis legend: T tokens, E experts, K slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax.routing.losses import entropy_loss
from moe_jax.routing.router import Router
from moe_jax.routing.token_choice import router_probs, select, take
from moe_jax.routing.types import TokenChoice, check_logits, check_number, check_slots


def top_p(
    logits: jax.Array,
    mass: float,
    *,
    max_active: int | None = None,
    renormalize: bool = False,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """The most probable experts until their probabilities add up to ``mass``.

    Source: Huang et al. 2024 (arXiv:2403.07652). The gates are the router probabilities.

    Args:
      logits: float[T, E]; cast to float32. Equal logits: the lowest index wins.
      mass: in (0, 1]; the expert that reaches it is the last.
      max_active: K, slots per token; E by default.
      renormalize: divide the gates of a token by their sum.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead (E: empty slot).

    Returns:
      TokenChoice with K slots, at least one in use for every valid token with a logit above -inf.

    Raises:
      ValueError: logits not [T, E], mass or max_active out of range.
    """
    logits, valid = check_logits(logits, valid)
    num_experts = logits.shape[1]
    slots = check_slots(max_active, num_experts)
    if not 0 < mass <= 1:
        raise ValueError(f"mass: got {mass}; allowed: 0 < number <= 1")
    probs = router_probs(logits, valid)
    expert, used = select(logits, slots, valid, chosen)
    gate = jnp.where(used, take(probs, expert), 0.0)
    if chosen is None and mass < 1:  # with 1, rounding decides when the sum is there
        before = jnp.cumsum(gate, axis=-1) - gate
        used = used & (before < mass)
        gate = jnp.where(used, gate, 0.0)
        expert = jnp.where(used, expert, num_experts)
    if renormalize:
        total = jnp.sum(gate, axis=-1, keepdims=True)
        gate = gate / jnp.where(total == 0, 1.0, total)
    return TokenChoice(expert, gate, logits, probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopP(Router):
    """``top_p``; how many experts a token gets is its own affair, k is for capacity alone.

    Attributes:
      mass, max_active, renormalize: as ``top_p`` takes them.
      entropy_weight: of the loss that keeps the number of active experts down.
    """

    mass: float = 0.5
    max_active: int | None = None
    renormalize: bool = False
    entropy_weight: float = 1e-4

    def __post_init__(self):
        check_number("entropy_weight", self.entropy_weight, at_least=0)

    def choose(self, logits, inputs, weights, state):
        return top_p(
            logits,
            self.mass,
            max_active=self.max_active,
            renormalize=self.renormalize,
            valid=inputs.valid,
            chosen=inputs.chosen,
        )

    def losses(self, choice, inputs, weights, state):
        return {"entropy": self.entropy_weight * entropy_loss(choice.probs, valid=inputs.valid)}
