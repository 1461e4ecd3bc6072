"""Routing in which the experts choose their tokens.

Axis legend: T tokens, d width, E experts, C capacity, G sequences.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from moe_jax.routing.router import CommonLosses, Routed, Router
from moe_jax.routing.token_choice import best, router_probs
from moe_jax.routing.types import ExpertChoice, check_chosen, check_count, check_logits


def expert_choice(
    logits: jax.Array,
    capacity: int,
    *,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> ExpertChoice:
    """Each expert takes the C tokens that give it the highest probability.

    The load is even by construction; a token may get any number of experts, also none. Whether a
    token is taken depends on all the others, the later ones too: not for causal models. Source:
    Zhou et al. 2022 (arXiv:2202.09368).

    Args:
      logits: float[T, E]; cast to float32. Probabilities are over the experts of a token. Equal
        ones: the token of lowest index wins.
      capacity: C, 1 <= C <= T; ceil(c T / E) gives c experts per token on average.
      valid: bool[T]; invalid tokens are not taken. None: all are valid.
      chosen: i32[E, C], tokens to take instead (T: empty slot).

    Returns:
      ExpertChoice. Slots without a valid token, or with a logit of -inf, are empty.

    Raises:
      ValueError: logits not [T, E], capacity out of range, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    num_tokens = logits.shape[0]
    capacity = check_count("capacity", capacity, num_tokens, "the number of tokens")
    probs = router_probs(logits, valid)
    # By the logarithm, since probabilities underflow to ties.
    score = jnp.where(logits == -jnp.inf, -jnp.inf, jax.nn.log_softmax(_finite(logits)))
    score = jnp.where(valid[:, None], score, -jnp.inf).T
    if chosen is None:
        token = best(score, capacity)
    else:
        token = check_chosen(chosen, logits.shape[1], "expert")
    place = jnp.clip(token, 0, num_tokens - 1)
    inside = (token >= 0) & (token < num_tokens)
    used = inside & (jnp.take_along_axis(score, place, axis=1) != -jnp.inf)
    gate = jnp.where(used, jnp.take_along_axis(probs.T, place, axis=1), 0.0)
    return ExpertChoice(jnp.where(used, token, num_tokens).astype(jnp.int32), gate, probs)


def _finite(logits):
    """The logits with -inf as the lowest float, so that a row of -inf only has no NaN."""
    return jnp.maximum(logits, jnp.finfo(jnp.float32).min / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoiceRouter(Router):
    """``expert_choice`` with a capacity of k experts per token on average, times capacity_factor.

    The choice is among all tokens of a call, whatever sequence they are of.
    """

    sees_future: ClassVar = "always"
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=None, z=0.0)
    choice_type: ClassVar[type] = ExpertChoice

    def route(self, inputs, weights, state, *, num_sequences=1, capacity=None):
        logits = self.logits(inputs, weights, state)
        num_tokens, num_experts = logits.shape
        if capacity is None:
            capacity = min(max(-(-self.k * num_tokens // num_experts), 1), num_tokens)
        choice = expert_choice(logits, capacity, valid=inputs.valid, chosen=inputs.chosen)
        return Routed(choice, logits, {})
