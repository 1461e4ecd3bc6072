"""A top-k gate without jumps: experts fade out over a margin below the k-th logit.

Axis legend: T tokens, E experts, k choices, K slots, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax.routing.losses import boundary_loss
from moe_jax.routing.router import Router, Weight, mask_experts
from moe_jax.routing.token_choice import masked_softmax, router_probs, select, take, top_k_softmax
from moe_jax.routing.types import TokenChoice, check_count, check_logits, check_number, check_slots


def smooth_top_k(
    logits: jax.Array,
    k: int,
    epsilon: jax.Array | float,
    *,
    a: float = 2.0,
    b: float = 2.0,
    max_active: int | None = None,
    stop_margin_gradient: bool = False,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Softmax over the experts within epsilon of the k-th logit, each weighted by where it is.

    With z_[k] the k-th largest logit and u_i = 1 + (z_i - z_[k]) / epsilon, expert i is active if
    u_i > 0 and its gate is the softmax over the active of z_i + h(u_i), where
    h(u) = log(u^a / (u^a + (1 - u)^b)) for u < 1 and 0 from there on. The gate is continuous in the
    logits; it is not differentiable everywhere for any a, b, since z_[k] has a kink at ties. The
    limit epsilon -> 0 is ``top_k_softmax``. Source: Tran Huu et al. 2026 (arXiv:2606.19036),
    section 6; their released code has a = 1, b = 50, and keeps one active expert too few, which is
    not repeated here.

    Args:
      logits: float[T, E]; cast to float32.
      k: experts that are active in any case, 1 <= k <= E.
      epsilon: f32[] > 0, the margin. A number <= 0 is refused; one computed under jit is not seen.
      a, b: > 0, the shape of the fading.
      max_active: K, slots per token, k <= K <= E; E by default. With fewer, the experts of lowest
        logit are cut where more are active, and there the gate jumps.
      stop_margin_gradient: let the gradient through h reach epsilon only, as the released code
        does; the logits then learn through the softmax alone.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], the only experts that take part (E: none); the k best are those of these.

    Returns:
      TokenChoice with K slots. Inactive experts take no slot.

    Raises:
      ValueError: logits not [T, E], an argument out of range.
    """
    logits, valid = check_logits(logits, valid)
    num_experts = logits.shape[1]
    k = check_count("k", k, num_experts, "the number of experts")
    slots = check_slots(max_active, num_experts)
    if slots < k:
        raise ValueError(f"max_active: got {max_active}; allowed: {k}..{num_experts} (k..E)")
    if not isinstance(epsilon, jax.core.Tracer) and not epsilon > 0:
        raise ValueError(f"epsilon: got {epsilon}; allowed: numbers > 0")
    check_number("a", a, above=0)
    check_number("b", b, above=0)
    if chosen is not None:
        slots = chosen.shape[1]
    expert, used = select(logits, slots, valid, chosen)
    z = jnp.where(used, take(logits, expert), -jnp.inf)
    source = jax.lax.stop_gradient(z) if stop_margin_gradient else z
    u, active = _margin(source, k, epsilon)
    gate = masked_softmax(jnp.where(active, z, 0.0) + _fade(u, a, b), active)
    # One that has faded to nothing, beyond float32, is no work for anybody.
    expert = jnp.where(active & ((u >= 1) | (gate > 0)), expert, num_experts)
    return TokenChoice(expert, gate, logits, router_probs(logits, valid))


def annealed_target(progress: jax.Array, k: int, extra: float) -> jax.Array:
    """Target of active experts over training: k + extra, falling to k in the third quarter.

    Args:
      progress: f32[], share of the training that is done.
      k: choices per token.
      extra: experts beyond k in the first half.
    """
    return k + extra * jnp.clip((0.75 - progress) / 0.25, 0.0, 1.0)


def _margin(z, k, epsilon):
    """u f32[T, K] and whether an expert is active; z has -inf in empty slots."""
    # A stored choice need not be sorted, and one of fewer than k experts has no k-th.
    kth = jax.lax.top_k(z, min(k, z.shape[1]))[0][:, -1:]
    alive = z != -jnp.inf
    gap = jnp.where(alive, z, 0.0) - jnp.where(kth == -jnp.inf, 0.0, kth)
    gap = jnp.where(alive & (kth != -jnp.inf), gap, 0.0)
    # A learned margin may underflow, and the gradient of gap / epsilon is gap / epsilon^2: what is
    # outside the margin, or above it, must not get there.
    epsilon = jnp.maximum(epsilon, 1e-18)
    fixed = jax.lax.stop_gradient(gap)
    outside, above = fixed <= -jax.lax.stop_gradient(epsilon), fixed > 0
    u = 1.0 + jnp.where(outside | above, 0.0, gap) / epsilon
    return jnp.where(outside, 0.0, u), alive & ~outside


def _fade(u, a, b):
    """h(u); 0 outside (0, 1)."""
    inside = (u > 0) & (u < 1)
    # Replaced before the logarithms as well: their gradient at 0 is infinite, and 0 * inf is NaN.
    u = jnp.where(inside, u, 0.5)
    return jnp.where(inside, jax.nn.log_sigmoid(a * jnp.log(u) - b * jnp.log1p(-u)), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothTopK(Router):
    """``smooth_top_k`` with a margin epsilon = softplus(eta) that each layer learns.

    The boundary loss drives the mean number of active experts to ``k + extra``.

    Attributes:
      a, b, max_active, stop_margin_gradient: as ``smooth_top_k`` takes them.
      extra: experts beyond k that are asked for on average.
      anneal: ``extra`` goes to 0 as ``annealed_target`` says, and evaluation is a hard top-k.
      initial_eta: -9 makes a margin of 1.234e-4.
      boundary_weight: of the boundary loss. The released code has 0.01 times the tokens of a batch.
      noise: training adds noise * N(0, 1) / E to the logits.
    """

    a: float = 2.0
    b: float = 2.0
    max_active: int | None = None
    stop_margin_gradient: bool = False
    extra: float = 0.5
    anneal: bool = False
    initial_eta: float = -9.0
    boundary_weight: float = 1.0
    noise: float = 0.0

    # GShard's form, as in the paper: the number of active experts is no matter of balance.
    balance_choices = "first"

    def __post_init__(self):
        check_number("extra", self.extra, at_least=0)
        check_number("initial_eta", self.initial_eta)
        check_number("boundary_weight", self.boundary_weight, at_least=0)
        check_number("noise", self.noise, at_least=0)

    def weights(self, width, num_experts):
        eta = Weight((), jax.nn.initializers.constant(self.initial_eta))
        return super().weights(width, num_experts) | {"eta": eta}

    def state(self, key, weights, num_experts):
        return {"target": jnp.asarray(self.k + self.extra, jnp.float32)}

    def logits(self, inputs, weights, state):
        logits = super().logits(inputs, weights, state)
        if inputs.key is None or not self.noise:
            return logits
        noise = jax.random.normal(inputs.key, logits.shape) / logits.shape[1]
        return mask_experts(logits + self.noise * noise, inputs.expert_mask)

    def choose(self, logits, inputs, weights, state):
        if self.anneal and inputs.key is None:
            return top_k_softmax(logits, self.k, valid=inputs.valid, chosen=inputs.chosen)
        return smooth_top_k(
            logits,
            self.k,
            jax.nn.softplus(weights["eta"]),
            a=self.a,
            b=self.b,
            max_active=self.max_active,
            stop_margin_gradient=self.stop_margin_gradient,
            valid=inputs.valid,
            chosen=inputs.chosen,
        )

    def losses(self, choice, inputs, weights, state):
        epsilon = jax.nn.softplus(weights["eta"])
        boundary = boundary_loss(
            choice.logits,
            self.k,
            epsilon,
            state["target"],
            weight=self.boundary_weight,
            valid=inputs.valid,
        )
        return {"boundary": boundary}

    def update(self, state, weights, observed):
        if not self.anneal:
            return state
        target = annealed_target(observed.progress, self.k, self.extra)
        return {"target": jnp.broadcast_to(target, state["target"].shape).astype(jnp.float32)}

    def report(self, weights, state):
        return {"epsilon": jax.nn.softplus(weights["eta"]), "active_target": state["target"]}
