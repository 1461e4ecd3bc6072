"""ReLU gates: an expert is active where its logit is positive (ReMoE).

Axis legend: T tokens, E experts, K slots, L layers.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from moe_jax.routing.losses import adapt_l1_weight, relu_l1_loss
from moe_jax.routing.router import CommonLosses, Router
from moe_jax.routing.token_choice import router_probs, select, take
from moe_jax.routing.types import TokenChoice, check_logits, check_number, check_slots, check_valid


def relu_gate(
    logits: jax.Array,
    *,
    max_active: int | None = None,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Every expert of positive logit, with the logit as its gate.

    Source: ReMoE (Wang et al. 2025, arXiv:2412.14711). The gates are used raw.

    Args:
      logits: float[T, E]; cast to float32.
      max_active: K, slots per token; E by default. With fewer, the experts of lowest logit are cut
        where more are active.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], the only experts that take part (E: none).

    Returns:
      TokenChoice with K slots; a token may have none in use.

    Raises:
      ValueError: logits not [T, E], max_active out of range.
    """
    logits, valid = check_logits(logits, valid)
    num_experts = logits.shape[1]
    slots = check_slots(max_active, num_experts)
    expert, used = select(jnp.where(logits <= 0, -jnp.inf, logits), slots, valid, chosen)
    gate = jnp.where(used, jax.nn.relu(take(logits, expert)), 0.0)
    return TokenChoice(expert, gate, logits, router_probs(logits, valid))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReluGate(Router):
    """``relu_gate`` with an L1 loss whose weight adapts until k experts are active on average.

    Attributes:
      max_active: as ``relu_gate`` takes it, more than k.
      initial_weight: of the loss, before the first step.
      factor: by which the weight grows or shrinks with every optimizer step.
    """

    max_active: int | None = None
    initial_weight: float = 1e-8
    factor: float = 1.2

    # The L1 loss is weighted by load, and so balances too.
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=0.0, z=0.0)

    can_leave_out_experts: ClassVar[bool] = False  # they would count as sparsity

    def check(self, num_experts):
        super().check(num_experts)
        if self.max_active is not None and self.k < num_experts and self.max_active <= self.k:
            raise ValueError(
                f"max_active: got {self.max_active}; allowed: {self.k + 1}..{num_experts} (more"
                " than k, or too many active experts would never be seen)"
            )

    def __post_init__(self):
        check_number("initial_weight", self.initial_weight, above=0)
        check_number("factor", self.factor, above=1)

    def state(self, key, weights, num_experts):
        return {"l1_weight": jnp.asarray(self.initial_weight, jnp.float32)}

    def choose(self, logits, inputs, weights, state):
        return relu_gate(
            logits, max_active=self.max_active, valid=inputs.valid, chosen=inputs.chosen
        )

    def losses(self, choice, inputs, weights, state):
        valid = check_valid(inputs.valid, choice.logits.shape[0])
        gates = jnp.where(valid[:, None], jax.nn.relu(choice.logits), 0.0)
        return {"l1": relu_l1_loss(gates, self.k, state["l1_weight"], valid=valid)}

    def update(self, state, weights, observed):
        num_layers, num_experts = observed.load.shape
        # One sparsity for all layers: each may use as many experts as it needs.
        active = jnp.sum(observed.load.astype(jnp.float32))
        pairs = observed.num_tokens.astype(jnp.float32) * num_layers * num_experts
        sparsity = 1.0 - active / jnp.maximum(pairs, 1.0)
        weight = adapt_l1_weight(state["l1_weight"], sparsity, self.k, num_experts, self.factor)
        return {"l1_weight": weight}

    def report(self, weights, state):
        return {"l1_weight": state["l1_weight"]}
