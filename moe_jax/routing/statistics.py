"""How the load is spread over the experts, and how sure the router is.

Axis legend: T tokens, E experts, K slots, S slots per expert, G sequences. "load" is the number of
assignments that the router gives to an expert, before any is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.routing.losses import entropy_loss, z_loss
from moe_jax.routing.types import (
    Choice,
    ExpertChoice,
    ExpertMerge,
    SoftChoice,
    check_valid,
    expert_counts,
)


class RoutingStatistics(NamedTuple):
    """Statistics of one layer's routing of one batch.

    Attributes:
      load: i32[E], assignments per expert, the dropped ones included.
      dropped: i32[E], assignments dropped per expert.
      load_cv: f32[], standard deviation of the load over its mean; 0 is perfect balance.
      dropped_fraction: f32[], dropped / load, both summed over experts.
      load_entropy: f32[], entropy of the load in nats; log E is perfect balance.
      max_share: f32[], the fullest expert's share of the load; 1/E is perfect balance.
      dead_experts: f32[], number of experts without load.
      router_entropy: f32[], mean over valid tokens of the entropy of probs, in nats.
      router_z: f32[], mean over valid tokens of logsumexp(logits)^2.
      active_experts: f32[], load summed over experts, per valid token.
      unrouted_fraction: f32[], share of the valid tokens that no expert takes, capacity aside.
    """

    load: jax.Array
    dropped: jax.Array
    load_cv: jax.Array
    dropped_fraction: jax.Array
    load_entropy: jax.Array
    max_share: jax.Array
    dead_experts: jax.Array
    router_entropy: jax.Array
    router_z: jax.Array
    active_experts: jax.Array
    unrouted_fraction: jax.Array


class LoadStatistics(NamedTuple):
    """The statistics of RoutingStatistics that follow from counts alone (each f32[])."""

    load_cv: jax.Array
    dropped_fraction: jax.Array
    load_entropy: jax.Array
    max_share: jax.Array
    dead_experts: jax.Array


def routing_statistics(
    routing: Choice,
    dropped: jax.Array,
    *,
    valid: jax.Array | None = None,
    logits: jax.Array | None = None,
) -> RoutingStatistics:
    """Statistics of one layer's routing, by whatever method.

    Where there is no assignment the load is what comes nearest: the slots of an expert of Soft MoE,
    and the valid tokens of all sequences in whose merged expert it has a part.

    Args:
      routing: the layer's routing, before capacity.
      dropped: i32[E], assignments dropped per expert, as ``dispatch.moe`` returns them.
      valid: bool[T], the tokens that count. None: all.
      logits: f32[T, E], for ``router_z``; needed for choices that have none of their own.
    """
    if logits is None:
        if not hasattr(routing, "logits"):
            name = type(routing).__name__
            raise ValueError(f"logits: got None; allowed with {name}: f32[T, E]")
        logits = routing.logits
    valid = check_valid(valid, routing.probs.shape[0])
    load, routed = _load(routing, valid)
    tokens = jnp.maximum(jnp.sum(valid), 1)
    return RoutingStatistics(
        load,
        dropped,
        *load_statistics(load, dropped),
        router_entropy=entropy_loss(routing.probs, valid=valid),
        router_z=z_loss(logits, valid=valid),
        active_experts=jnp.sum(load) / tokens,
        unrouted_fraction=jnp.sum(valid & ~routed) / tokens,
    )


def load_statistics(load: jax.Array, dropped: jax.Array) -> LoadStatistics:
    """Statistics of counts, which may be sums over many batches.

    Args:
      load: int[E] or float[E], assignments per expert.
      dropped: int[E] or float[E], assignments dropped per expert.

    Returns:
      LoadStatistics; all zeros but ``dead_experts`` when there is no load.
    """
    load, dropped = jnp.asarray(load, jnp.float32), jnp.asarray(dropped, jnp.float32)
    total = jnp.sum(load)
    share = load / jnp.where(total == 0, 1.0, total)
    return LoadStatistics(
        # std/mean of the load, written with shares, whose mean is 1/E.
        load_cv=jnp.where(total == 0, 0.0, jnp.std(share) * load.size),
        dropped_fraction=jnp.sum(dropped) / jnp.where(total == 0, 1.0, total),
        load_entropy=-jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0))),
        max_share=jnp.max(share),
        dead_experts=jnp.sum(load == 0).astype(jnp.float32),
    )


def _load(routing, valid):
    """i32[E], and bool[T] whether any expert takes the token."""
    num_tokens, num_experts = routing.probs.shape
    if isinstance(routing, ExpertChoice):
        taken = jnp.zeros(num_tokens, bool).at[routing.token].set(True, mode="drop")
        there = valid.at[routing.token].get(mode="fill", fill_value=False)
        return jnp.sum(there, axis=1, dtype=jnp.int32), taken
    if isinstance(routing, SoftChoice):
        slots = routing.dispatch.shape[-1] * (num_tokens // routing.dispatch.shape[-3])
        return jnp.full(num_experts, slots, jnp.int32), valid
    if isinstance(routing, ExpertMerge):
        length = num_tokens // routing.weight.shape[0]
        tokens = jnp.sum(valid.reshape(-1, length), axis=1, dtype=jnp.int32)
        return jnp.sum((routing.weight > 0) * tokens[:, None], axis=0, dtype=jnp.int32), valid
    expert = jnp.where(valid[:, None], routing.expert, num_experts)
    return expert_counts(expert, num_experts), jnp.any(expert < num_experts, axis=-1)
