"""The training step: loss, gradient over microbatches, update.

Axis legend: B sequences in the batch, S sequence length, V vocabulary, T = B*S tokens, L layers
with experts, E experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from moe_jax.layers import RoutingInfo
from moe_jax.routing import (
    RoutingStatistics,
    load_balance_loss,
    load_statistics,
    routing_statistics,
    z_loss,
)
from moe_jax.train.metrics import Metrics
from moe_jax.train.state import TrainState

Batch = dict[str, jax.Array]


class AuxiliaryWeights(NamedTuple):
    """What each router loss counts in the loss that is minimised."""

    load_balance: float
    z: float


class Sums(NamedTuple):
    """Sums over the valid tokens of a microbatch; those of a batch are the sums of these.

    Attributes:
      nll: f32[], negative log-likelihood in nats.
      load_balance, z: f32[], the microbatch's loss (mean over layers) times its tokens; None for
        a dense model, as all below.
      load, dropped: i32[L, E].
      router_entropy, router_z: f32[L].
    """

    nll: jax.Array
    load_balance: jax.Array | None
    z: jax.Array | None
    load: jax.Array | None
    dropped: jax.Array | None
    router_entropy: jax.Array | None
    router_z: jax.Array | None


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    weights: AuxiliaryWeights,
    *,
    accumulate_steps: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted function (state, batch) -> (state after one update, Metrics).

    The batch is {"tokens": int[B, S+1]}, with "valid": bool[B, S] where some targets do not count.
    The loss is the mean of the cross-entropy over the valid tokens of the whole batch, plus the
    auxiliary losses: each the mean over layers of the loss of a layer. The cross-entropy and its
    gradient do not depend on ``accumulate_steps``. An auxiliary loss does, since it is taken of
    each microbatch by itself (their mean counts by tokens): balance is asked of every microbatch.

    Args:
      model: called as ``LanguageModel``.
      optimizer: whose learning rate is that of ``schedule``, which is only reported here.
      weights: of the auxiliary losses.
      accumulate_steps: microbatches, a divisor of B; the memory of activations shrinks by it.

    Returns:
      A function that donates the state given to it. Random numbers depend on the state's key and
      step alone.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        total = _num_valid(batch)
        gradient_of = jax.grad(_share_of_loss, has_aux=True)

        def accumulate(gradient, microbatch):
            index, part = microbatch
            part_key = jax.random.fold_in(key, index)
            addend, sums = gradient_of(state.params, model, part, part_key, weights, total)
            return jax.tree.map(jnp.add, gradient, addend), sums

        parts = _split(batch, accumulate_steps)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradient, sums = jax.lax.scan(accumulate, zeros, (jnp.arange(accumulate_steps), parts))
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        metrics = _metrics(
            jax.tree.map(lambda x: jnp.sum(x, axis=0), sums),
            weights,
            gradient_norm=optax.tree.norm(gradient),
            learning_rate=jnp.asarray(schedule(state.step), jnp.float32),
            num_tokens=total,
        )
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return jax.jit(step, donate_argnums=0)


def token_nll(logits: jax.Array, targets: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Negative log-likelihood in nats: f32[B, S] of logits [B, S, V]; 0 where not valid."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nll if valid is None else jnp.where(valid, nll, 0.0)


def layer_statistics(info: RoutingInfo, valid: jax.Array | None) -> RoutingStatistics:
    """``routing_statistics`` of each layer: every field with a leading axis L."""
    valid = None if valid is None else valid.reshape(-1)
    return jax.vmap(lambda r, d: routing_statistics(r, d, valid=valid))(*info)


def _share_of_loss(params, model, part, key, weights, total):
    """What ``part`` adds to the loss of a batch of ``total`` tokens, and the Sums of ``part``."""
    valid = part.get("valid")
    logits, info = model.apply(
        {"params": params},
        part["tokens"][:, :-1],
        valid=valid,
        deterministic=False,
        rngs={"dropout": key},
    )
    nll = jnp.sum(token_nll(logits, part["tokens"][:, 1:], valid))
    if info is None:
        return nll / total, Sums(nll, *[None] * 6)
    tokens = _num_valid(part)
    flat = None if valid is None else valid.reshape(-1)
    balance = jax.vmap(lambda routing: load_balance_loss(routing, valid=flat))(info.routing)
    z = jax.vmap(lambda logits: z_loss(logits, valid=flat))(info.routing.logits)
    balance, z = jnp.mean(balance) * tokens, jnp.mean(z) * tokens
    statistics = jax.lax.stop_gradient(layer_statistics(info, valid))
    sums = Sums(
        nll,
        balance,
        z,
        statistics.load,
        statistics.dropped,
        statistics.router_entropy * tokens,
        statistics.router_z * tokens,
    )
    return (nll + _weighted(weights, balance, z)) / total, sums


def _weighted(weights, balance, z):
    """The auxiliary part of the loss. A loss without weight is left out: it may be infinite."""
    values = AuxiliaryWeights(balance, z)
    return sum(w * value for w, value in zip(weights, values, strict=True) if w)


def _metrics(sums, weights, *, num_tokens, **others):
    """Metrics of the whole batch; ``others`` are fields that do not come from the sums."""
    cross_entropy = sums.nll / num_tokens
    others["num_tokens"] = num_tokens
    if sums.load is None:
        return Metrics(cross_entropy, cross_entropy, None, None, None, **others)
    balance, z = sums.load_balance / num_tokens, sums.z / num_tokens
    routing = RoutingStatistics(
        sums.load,
        sums.dropped,
        *jax.vmap(load_statistics)(sums.load, sums.dropped),
        router_entropy=sums.router_entropy / num_tokens,
        router_z=sums.router_z / num_tokens,
    )
    loss = cross_entropy + _weighted(weights, balance, z)
    return Metrics(loss, cross_entropy, balance, z, routing, **others)


def _num_valid(batch: Batch) -> jax.Array:
    """i32[], at least 1."""
    if "valid" in batch:
        return jnp.maximum(jnp.sum(batch["valid"], dtype=jnp.int32), 1)
    return jnp.asarray(batch["tokens"][:, 1:].size, jnp.int32)


def _split(batch: Any, parts: int) -> Any:
    """[B, ...] to [parts, B / parts, ...] in every leaf."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
