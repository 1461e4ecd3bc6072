"""Routing without a discrete choice: Soft MoE mixes tokens, SMEAR mixes experts.

Both mix over a whole sequence, so an output depends on later tokens: not for causal models.

Axis legend: T tokens, d width, E experts, S slots per expert, G sequences of T/G tokens each.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from moe_jax.routing.logits import linear_logits, unit
from moe_jax.routing.router import CommonLosses, Routed, Router, Weight
from moe_jax.routing.token_choice import masked_softmax, router_probs
from moe_jax.routing.types import ExpertMerge, SoftChoice, check_logits, check_valid, check_whole


def soft_moe_weights(
    x: jax.Array,
    slots: jax.Array,
    *,
    valid: jax.Array | None = None,
    expert_mask: jax.Array | None = None,
) -> SoftChoice:
    """Each slot's mixture of the tokens, and each token's mixture of the slots, of one sequence.

    With logits x @ slots: ``dispatch`` is their softmax over tokens, ``combine`` over all slots.
    Source: Soft MoE (Puigcerver et al. 2024, arXiv:2308.00951), algorithm 1.

    Args:
      x: float[T, d]; the logits are float32 from the product on.
      slots: f32[d, E, S], or [d, E] for one slot per expert.
      valid: bool[T]; invalid tokens are in no slot and take from none. None: all are valid.
      expert_mask: bool[E], experts whose slots take part. None: all.

    Returns:
      SoftChoice with weights [T, E, S].

    Raises:
      ValueError: shapes that do not fit.
    """
    x, slots = jnp.asarray(x), jnp.asarray(slots)
    slots = slots[:, :, None] if slots.ndim == 2 else slots
    if jnp.ndim(x) != 2 or jnp.ndim(slots) != 3 or x.shape[1] != slots.shape[0]:
        raise ValueError(
            f"x, slots: got shapes {jnp.shape(x)}, {jnp.shape(slots)}; allowed: [T, d], [d, E, S]"
        )
    width, num_experts, num_slots = slots.shape
    valid = check_valid(valid, x.shape[0])
    logits = linear_logits(x, slots.reshape(width, -1))
    there = jnp.broadcast_to(valid[:, None], logits.shape)
    if expert_mask is not None:
        there = there & jnp.repeat(expert_mask, num_slots)
    shape = (x.shape[0], num_experts, num_slots)
    dispatch = masked_softmax(logits.T, there.T).T.reshape(shape)
    combine = masked_softmax(logits, there).reshape(shape)
    return SoftChoice(dispatch, combine, jnp.sum(combine, axis=-1))


def merge_weights(
    logits: jax.Array, num_sequences: int = 1, *, valid: jax.Array | None = None
) -> ExpertMerge:
    """One mixture of the experts' parameters for every sequence.

    The softmax of the mean over a sequence's valid tokens of their logits: for linear logits, those
    of the mean token. Source: SMEAR (Muqeeth et al. 2024, arXiv:2306.03745).

    Args:
      logits: float[T, E]; cast to float32. An expert with a logit of -inf has no part in its
        sequence.
      num_sequences: G, the tokens are so many sequences of equal length one after the other.
      valid: bool[T]. None: all are valid.

    Raises:
      ValueError: logits not [T, E], G no divisor of T, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    num_tokens, num_experts = logits.shape
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"num_sequences: got {num_sequences}; allowed: divisors of {num_tokens}")
    shape = (num_sequences, -1, num_experts)
    there = valid.reshape(num_sequences, -1, 1)
    count = jnp.sum(there, axis=1)
    gone = jnp.any(there & (logits == -jnp.inf).reshape(shape), axis=1)
    finite = jnp.where(logits == -jnp.inf, 0.0, logits).reshape(shape)
    mean = jnp.sum(jnp.where(there, finite, 0.0), axis=1) / jnp.maximum(count, 1)
    weight = masked_softmax(mean, ~gone & (count > 0))
    return ExpertMerge(weight, valid, router_probs(logits, valid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftMoE(Router):
    """``soft_moe_weights`` of every sequence, with tokens and slots of norm 1 (paper, section 2.3).

    E * slots_per_expert rows are computed per sequence: k T/(G E) slots cost as much as k experts
    per token.

    Attributes:
      slots_per_expert: S.
    """

    slots_per_expert: int = 16

    sees_future: ClassVar = "always"
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=None, z=None)
    choice_type: ClassVar[type] = SoftChoice

    def __post_init__(self):
        check_whole("slots_per_expert", self.slots_per_expert, at_least=1)

    def weights(self, width, num_experts):
        shape = (width, num_experts, self.slots_per_expert)
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=1)
        return {"slots": Weight(shape, init), "scale": Weight((), jax.nn.initializers.ones)}

    def route(self, inputs, weights, state, *, num_sequences=1, capacity=None):
        if inputs.chosen is not None:
            raise ValueError("chosen: got a choice; the router soft_moe makes none to repeat")
        x = unit(inputs.x.astype(jnp.float32), axis=-1)
        slots = weights["scale"] * unit(weights["slots"], axis=0)
        valid = check_valid(inputs.valid, x.shape[0])
        choice = jax.vmap(
            lambda x, valid: soft_moe_weights(x, slots, valid=valid, expert_mask=inputs.expert_mask)
        )(
            x.reshape(num_sequences, -1, x.shape[1]),
            valid.reshape(num_sequences, -1),
        )
        probs = choice.probs.reshape(x.shape[0], -1)
        # There are no logits of experts; those of the probabilities stand for them.
        logits = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
        return Routed(choice._replace(probs=probs), logits, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smear(Router):
    """``merge_weights``: every sequence runs through one expert, merged for it."""

    sees_future: ClassVar = "always"
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=None, z=0.0)
    choice_type: ClassVar[type] = ExpertMerge

    def route(self, inputs, weights, state, *, num_sequences=1, capacity=None):
        if inputs.chosen is not None:
            raise ValueError("chosen: got a choice; the router smear makes none to repeat")
        logits = self.logits(inputs, weights, state)
        return Routed(merge_weights(logits, num_sequences, valid=inputs.valid), logits, {})
