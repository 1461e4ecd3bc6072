"""The training step: loss, gradient over microbatches, update.

Axis legend: B sequences in the batch, S sequence length, V vocabulary, T = B*S tokens, L layers
with experts, E experts.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.layers import RoutingInfo
from moe_jax.models.routers import stack_routers, unstack_routers
from moe_jax.routing import (
    Observed,
    Router,
    RoutingStatistics,
    TokenChoice,
    load_balance_loss,
    load_statistics,
    routing_statistics,
    z_loss,
)
from moe_jax.train.metrics import Metrics
from moe_jax.train.state import Skipped, TrainState

Batch = dict[str, jax.Array]

# Sets the randomness of routing apart from dropout, which has the key itself.
_ROUTER = 1


class AuxiliaryWeights(NamedTuple):
    """What the losses that all routers may have count in the loss that is minimised.

    Attributes:
      load_balance, z: weights. A method's own losses come with theirs.
      balance_choices: as ``load_balance_loss`` takes it.
      balance_per_sequence: the load-balance loss is of every sequence instead of the microbatch.
    """

    load_balance: float
    z: float
    balance_choices: Literal["all", "first"] = "all"
    balance_per_sequence: bool = False


class Sums(NamedTuple):
    """Sums over the valid tokens of a microbatch; those of a batch are the sums of these.

    Attributes:
      nll: f32[], negative log-likelihood in nats.
      load_balance, z: f32[], the microbatch's loss (mean over layers) times its tokens; None for
        a dense model, as all below. load_balance is None for methods without assignments too.
      own: the routing method's own losses by name, weighted, likewise.
      load, dropped: i32[L, E].
      router_entropy, router_z, unrouted_fraction: f32[L], times the tokens.
    """

    nll: jax.Array
    load_balance: jax.Array | None = None
    z: jax.Array | None = None
    own: dict[str, jax.Array] | None = None
    load: jax.Array | None = None
    dropped: jax.Array | None = None
    router_entropy: jax.Array | None = None
    router_z: jax.Array | None = None
    unrouted_fraction: jax.Array | None = None


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    weights: AuxiliaryWeights,
    *,
    accumulate_steps: int = 1,
    method: Router | None = None,
    steps: int = 1,
    batch_axes: tuple[str, ...] = (),
    state_shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted function (state, batch) -> (state after one update, Metrics).

    The batch is {"tokens": int[B, S+1]}, with "valid": bool[B, S] where some targets do not count.
    The loss is the mean of the cross-entropy over the valid tokens of the whole batch, plus the
    auxiliary losses: each the mean over layers of the loss of a layer. The cross-entropy and its
    gradient do not depend on ``accumulate_steps``. An auxiliary loss does, since it is taken of
    each microbatch by itself (their mean counts by tokens): balance is asked of every microbatch.

    Where the state counts skipped steps, one whose loss or gradient is not finite changes nothing
    but the counts and the step; the learning rate goes on with the updates, not with the steps.

    Args:
      model: called as ``LanguageModel``.
      optimizer: whose learning rate is that of ``schedule``, which is only reported here.
      weights: of the auxiliary losses.
      accumulate_steps: microbatches, a divisor of B; the memory of activations shrinks by it.
      method: of the model's routers; their state changes once per step. None: a dense model.
      steps: of the whole training, for methods that change over it.
      batch_axes: mesh axes of ``jax.set_mesh`` that share every microbatch.
      state_shardings: where the new state is to lie; metrics are then whole on every device.

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
            addend, sums = gradient_of(
                state.params, state.router_state, model, part, part_key, weights, total
            )
            return jax.tree.map(jnp.add, gradient, addend), sums

        parts = _split(batch, accumulate_steps, batch_axes)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradient, sums = jax.lax.scan(accumulate, zeros, (jnp.arange(accumulate_steps), parts))
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        params = optax.apply_updates(state.params, updates)
        router_state, report = state.router_state, {}
        if method is not None:
            progress = (state.step + 1) / steps
            observed = Observed(sums.load, total, jnp.asarray(progress, jnp.float32))
            router_state, report = _update_routers(method, router_state, params, observed)
        made = state.step if state.skipped is None else state.step - state.skipped.total
        metrics = _metrics(
            sums,
            weights,
            gradient_norm=optax.tree.norm(gradient),
            learning_rate=jnp.asarray(schedule(made), jnp.float32),
            num_tokens=total,
            report=report,
        )
        new = TrainState(state.step + 1, params, router_state, opt_state, state.key)
        if state.skipped is not None:
            new = _skip_nonfinite(new, state, metrics)
        return new, metrics._replace(skipped=new.skipped)

    if state_shardings is None:
        return jax.jit(step, donate_argnums=0)
    whole = NamedSharding(state_shardings.step.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, whole))


def token_nll(logits: jax.Array, targets: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Negative log-likelihood in nats: f32[B, S] of logits [B, S, V]; 0 where not valid."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return nll if valid is None else jnp.where(valid, nll, 0.0)


def layer_statistics(info: RoutingInfo, valid: jax.Array | None) -> RoutingStatistics:
    """``routing_statistics`` of each layer: every field with a leading axis L."""
    valid = None if valid is None else valid.reshape(-1)

    def statistics(routing, dropped, logits):
        return routing_statistics(routing, dropped, valid=valid, logits=logits)

    return jax.vmap(statistics)(info.routing, info.dropped, info.logits)


def _share_of_loss(params, router_state, model, part, key, weights, total):
    """What ``part`` adds to the loss of a batch of ``total`` tokens, and the Sums of ``part``."""
    valid = part.get("valid")
    logits, info = model.apply(
        {"params": params, "router_state": router_state},
        part["tokens"][:, :-1],
        valid=valid,
        deterministic=False,
        rngs={"dropout": key, "router": jax.random.fold_in(key, _ROUTER)},
    )
    nll = jnp.sum(token_nll(logits, part["tokens"][:, 1:], valid))
    if info is None:
        return nll / total, Sums(nll)
    tokens = _num_valid(part)
    balance, z = _common_losses(info, valid, weights, num_sequences=len(part["tokens"]))
    statistics = jax.lax.stop_gradient(layer_statistics(info, valid))
    sums = Sums(
        nll,
        None if balance is None else balance * tokens,
        z * tokens,
        jax.tree.map(lambda loss: jnp.mean(loss) * tokens, info.losses),
        statistics.load,
        statistics.dropped,
        statistics.router_entropy * tokens,
        statistics.router_z * tokens,
        statistics.unrouted_fraction * tokens,
    )
    return (nll + _auxiliary(sums, weights)) / total, sums


def _common_losses(info, valid, weights, num_sequences):
    """The load-balance loss (None without assignments of tokens) and the z-loss: layer means."""
    valid = None if valid is None else valid.reshape(-1)
    z = jnp.mean(jax.vmap(lambda logits: z_loss(logits, valid=valid))(info.logits))
    if not isinstance(info.routing, TokenChoice):
        return None, z

    def balance(routing):
        return load_balance_loss(
            routing,
            valid=valid,
            choices=weights.balance_choices,
            num_sequences=num_sequences if weights.balance_per_sequence else None,
        )

    return jnp.mean(jax.vmap(balance)(info.routing)), z


def _auxiliary(sums, weights):
    """The auxiliary part of the loss. A loss without weight is left out: it may be infinite."""
    terms = [(weights.load_balance, sums.load_balance), (weights.z, sums.z)]
    common = sum(w * value for w, value in terms if w and value is not None)
    return common + sum(sums.own.values())


def _update_routers(method, router_state, params, observed):
    """The routers' state after the step, and the method's report of it: means over layers."""
    weights = stack_routers(params)
    state = stack_routers(router_state).get("state", {})
    if state:
        state = method.update(state, weights, observed)
        router_state = unstack_routers({"state": state}, router_state)
    report = jax.vmap(method.report)(weights, state) if weights or state else {}
    return router_state, jax.tree.map(jnp.mean, report)


def _skip_nonfinite(new, old, metrics):
    """``new``, or the ``old`` state one step on if the step's numbers are not finite."""
    finite = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.gradient_norm)
    in_a_row = jnp.where(finite, 0, old.skipped.in_a_row + 1)
    skipped = Skipped(old.skipped.total + ~finite, in_a_row)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new._replace(skipped=skipped), old)
    return kept._replace(step=new.step, skipped=skipped)


def _metrics(sums, weights, *, num_tokens, **others):
    """Metrics of the whole batch; ``others`` are fields that do not come from the sums."""
    others["num_tokens"] = num_tokens
    mean = jax.tree.map(lambda x: x / num_tokens, sums)
    if sums.load is None:
        return Metrics(mean.nll, mean.nll, None, None, None, {}, **others)
    routing = RoutingStatistics(
        sums.load,
        sums.dropped,
        *jax.vmap(load_statistics)(sums.load, sums.dropped),
        router_entropy=mean.router_entropy,
        router_z=mean.router_z,
        active_experts=jnp.sum(mean.load, axis=-1),
        unrouted_fraction=mean.unrouted_fraction,
    )
    loss = mean.nll + _auxiliary(mean, weights)
    return Metrics(loss, mean.nll, mean.load_balance, mean.z, routing, mean.own, **others)


def _num_valid(batch: Batch) -> jax.Array:
    """i32[], at least 1."""
    if "valid" in batch:
        return jnp.maximum(jnp.sum(batch["valid"], dtype=jnp.int32), 1)
    return jnp.asarray(batch["tokens"][:, 1:].size, jnp.int32)


def _split(batch: Any, parts: int, batch_axes: tuple[str, ...]) -> Any:
    """[B, ...] to [parts, B / parts, ...] in every leaf."""

    def split(x):
        x = x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
        if not batch_axes:
            return x
        # Else every microbatch would lie on a few of the devices.
        return jax.lax.with_sharding_constraint(x, PartitionSpec(None, batch_axes))

    return jax.tree.map(split, batch)
