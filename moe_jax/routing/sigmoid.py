"""Independent sigmoid scores, with a bias that only selects and a choice limited to groups.

Axis legend: T tokens, E experts, k choices, L layers.
"""

import dataclasses
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp

from moe_jax.routing.losses import balance_bias
from moe_jax.routing.router import CommonLosses, Router
from moe_jax.routing.token_choice import best, masked_softmax, router_probs, select, take
from moe_jax.routing.types import (
    ConstantGateWarning,
    TokenChoice,
    check_count,
    check_logits,
    check_number,
)


def sigmoid_top_k(
    logits: jax.Array,
    k: int,
    *,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Takes the k experts of highest sigmoid(logit) + bias; the gates come from sigmoid(logit).

    Source: DeepSeek-V3 (arXiv:2412.19437), eqs. 12-16, and its group-limited choice: a group
    scores the sum of its two best experts, and experts outside the best groups count as -inf (in
    some published code as 0, which a negative bias falls below). The softmax ``probs`` are the
    package's, for the balance loss; the paper normalises the sigmoids there.

    Args:
      logits: float[T, E]; cast to float32. Equal scores: the lowest index wins.
      k: choices per token, 1 <= k <= E / num_groups * top_groups.
      bias: f32[E], added for the selection and never in the gate; no gradient reaches it.
      num_groups: the experts are so many groups of neighbours; a divisor of E.
      top_groups: how many groups a token may choose from.
      renormalize: divide the k gates by their sum, exactly 1 however small the scores. With k = 1
        the router then gets no gradient from the output.
      scale: factor on the gates, after that.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead of the k best (E: empty slot).

    Returns:
      TokenChoice with K = k, its slots sorted by falling logit. A chosen logit of -inf leaves its
      slot empty.

    Raises:
      ValueError: logits not [T, E]; k, num_groups or top_groups out of range; bias not [E].
    """
    logits, valid = check_logits(logits, valid)
    num_experts = logits.shape[1]
    if num_experts % check_count("num_groups", num_groups, num_experts, "the number of experts"):
        raise ValueError(f"num_groups: got {num_groups}; allowed: divisors of {num_experts} (E)")
    check_count("top_groups", top_groups, num_groups, "num_groups")
    check_number("scale", scale, above=0)
    available = num_experts // num_groups * top_groups
    k = check_count("k", k, available, "the number of experts in top_groups groups")
    if bias is not None and jnp.shape(bias) != (num_experts,):
        raise ValueError(f"bias: got shape {jnp.shape(bias)}; allowed: {(num_experts,)}")
    if k == 1 and renormalize:
        warnings.warn(
            "sigmoid_top_k with k=1: the renormalised gate is a constant, so the router gets no"
            " gradient through the output; use renormalize=False.",
            ConstantGateWarning,
            stacklevel=2,
        )
    if chosen is None:
        scores = _selection_scores(jax.lax.stop_gradient(logits), bias, num_groups, top_groups)
        picked, used = select(scores, k, valid)
        chosen = _by_falling_logit(picked, used, logits)
    expert, used = select(logits, k, valid, chosen)
    z = take(logits, expert)
    if renormalize:
        # The softmax of log sigmoid is sigmoid over the sum, without a sum that could underflow.
        z = jnp.where(used, z, 0.0)
        gate = masked_softmax(jax.nn.log_sigmoid(z), used)
    else:
        gate = jnp.where(used, jax.nn.sigmoid(z), 0.0)
    return TokenChoice(expert, scale * gate, logits, router_probs(logits, valid))


def _selection_scores(logits, bias, num_groups, top_groups):
    """f32[T, E] to select by; -inf outside the best groups and where the logit is -inf."""
    num_tokens, num_experts = logits.shape
    if bias is None and top_groups == num_groups:
        return logits  # the same order, and large logits do not tie at 1
    scores = jax.nn.sigmoid(logits) + (0.0 if bias is None else jax.lax.stop_gradient(bias))
    scores = jnp.where(logits == -jnp.inf, -jnp.inf, scores)
    if top_groups == num_groups:
        return scores
    grouped = scores.reshape(num_tokens, num_groups, num_experts // num_groups)
    two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0]
    # A group of fewer live experts than two counts those that it has.
    value = jnp.sum(jnp.where(two == -jnp.inf, 0.0, two), axis=-1)
    value = jnp.where(two[..., 0] == -jnp.inf, -jnp.inf, value)
    group = best(value, top_groups)
    token = jnp.arange(num_tokens)[:, None]
    inside = jnp.zeros((num_tokens, num_groups), bool).at[token, group].set(True)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _by_falling_logit(expert, used, logits):
    """The slots in order of their logits, empty ones last, equal ones by index of the expert."""
    z = jnp.where(used, take(logits, expert), -jnp.inf)
    order = jnp.lexsort((expert, -z), axis=-1)
    return jnp.take_along_axis(expert, order, axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidTopK(Router):
    """``sigmoid_top_k`` with a bias that evens out the load, instead of a loss (DeepSeek-V3).

    Attributes:
      num_groups, top_groups, renormalize, scale: as ``sigmoid_top_k`` takes them.
      bias_rate: by how much the bias of an expert moves per optimizer step; 0: there is none.
    """

    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    bias_rate: float = 0.001

    can_leave_out_experts: ClassVar[bool] = False  # their bias would rise meanwhile
    # The paper keeps a balance loss of this weight beside the bias, per sequence.
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=1e-4, z=0.0)

    def __post_init__(self):
        check_number("scale", self.scale, above=0)
        check_number("bias_rate", self.bias_rate, at_least=0)

    def state(self, key, weights, num_experts):
        return {"bias": jnp.zeros(num_experts, jnp.float32)}

    def choose(self, logits, inputs, weights, state):
        return sigmoid_top_k(
            logits,
            self.k,
            # Even a bias of 0 makes large logits tie, whose sigmoid is 1.
            bias=state["bias"] if self.bias_rate else None,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            renormalize=self.renormalize,
            scale=self.scale,
            valid=inputs.valid,
            chosen=inputs.chosen,
        )

    def update(self, state, weights, observed):
        bias = jax.vmap(lambda b, load: balance_bias(b, load, self.bias_rate))
        return {"bias": bias(state["bias"], observed.load)}

    def report(self, weights, state):
        return {"bias_span": jnp.max(state["bias"]) - jnp.min(state["bias"])}
