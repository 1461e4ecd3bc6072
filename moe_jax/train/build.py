"""From a config to the things it names: the only place that maps fields to modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from moe_jax.config import ConfigError
from moe_jax.kernels import explain
from moe_jax.layers import Mlp, MoE
from moe_jax.models.language_model import LanguageModel
from moe_jax.routing import Router, TokenChoice, make_router
from moe_jax.sharding import (
    BATCH_AXES,
    MeshError,
    expert_parallel_of,
    make_mesh,
    num_batch_shards,
)
from moe_jax.train.optimizer import learning_rate_schedule, make_optimizer
from moe_jax.train.state import TrainState, initial_state
from moe_jax.train.step import AuxiliaryWeights, make_train_step


def vocabulary_of(config: ConfigDict) -> int:
    """The tokens of the config's tokenizer, which is not looked at."""
    from moe_jax.data.tokenizers import ByteTokenizer

    is_byte = config.data.tokenizer == "byte"
    return ByteTokenizer.vocab_size if is_byte else config.data.vocab_size


def make_model(config: ConfigDict, vocab_size: int, mesh: Mesh | None = None) -> LanguageModel:
    """The model of a single-run config (``moe_jax.config.resolve_runs``).

    Args:
      config: validated.
      vocab_size: of the tokenizer.
      mesh: that it is to run on, as ``jax.set_mesh`` says then; None: one device.
    """
    model, moe = config.model, config.moe
    dtype = jnp.dtype(model.dtype)
    feed_forward = dict(
        activation=model.activation,
        glu=model.glu,
        use_bias=model.use_bias,
        dropout=model.dropout,
        dtype=dtype,
    )
    make_moe = None
    if moe.num_experts:
        make_moe = functools.partial(
            MoE,
            num_experts=moe.num_experts,
            expert_width=moe.expert_width,
            method=make_method(config),
            num_shared_experts=moe.num_shared_experts,
            implementation=moe.implementation,
            capacity_factor=moe.capacity_factor,
            priority=moe.priority,
            backend=moe.backend,
            parallel=None if mesh is None else _make_parallel(config, mesh),
            input_jitter=moe.input_jitter,
            expert_dropout=moe.expert_dropout,
            **feed_forward,
        )
    return LanguageModel(
        vocab_size=vocab_size,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        dense=functools.partial(Mlp, model.mlp_width, **feed_forward),
        moe=make_moe,
        moe_every=moe.every,
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
        remat=model.remat,
        scan_layers=model.scan_layers,
        dtype=dtype,
        batch_axes=() if mesh is None else BATCH_AXES,
    )


def make_run_mesh(config: ConfigDict, devices: Sequence[Any] | None = None) -> Mesh | None:
    """The mesh of a single-run config; None for one device.

    Args:
      config: validated.
      devices: to be used; None: those there are.

    Raises:
      ConfigError: the sizes do not fit the devices, the experts or the batch.
    """
    sizes = config.mesh
    try:
        mesh = make_mesh(
            data=sizes.data,
            fsdp=sizes.fsdp,
            expert=sizes.expert,
            tensor=sizes.tensor,
            devices=devices,
        )
        _check_mesh(config, mesh)
    except MeshError as error:
        raise ConfigError(f"config.{error}") from None
    return mesh if mesh.size > 1 else None


def _check_mesh(config, mesh):
    """Checks what of a run is to be divided by the sizes of the mesh."""
    shards, optimizer = num_batch_shards(mesh), config.optimizer
    microbatch = config.data.batch_size // optimizer.accumulate_steps
    if microbatch % shards:
        what = "data.batch_size"
        if optimizer.accumulate_steps > 1:
            what = "data.batch_size / optimizer.accumulate_steps"
        raise ConfigError(
            f"config.{what}: got {microbatch}; allowed with data {mesh.shape['data']} x fsdp"
            f" {mesh.shape['fsdp']} x expert {mesh.shape['expert']} = {shards} devices that share"
            f" the batch: multiples of {shards}, or smaller sizes in config.mesh"
        )
    for axis, name in _divided(config):
        number = config[name.partition(".")[0]][name.partition(".")[2]]
        if number % mesh.shape[axis]:
            raise ConfigError(
                f"config.mesh.{axis}: got {mesh.shape[axis]}; allowed: divisors of {number}"
                f" (config.{name})"
            )
    if config.mesh.expert % config.mesh.expert_nodes:
        raise ConfigError(
            f"config.mesh.expert_nodes: got {config.mesh.expert_nodes}; allowed: divisors of"
            f" {config.mesh.expert} (config.mesh.expert)"
        )
    _check_exchange(config, mesh)


def _check_exchange(config, mesh):
    """Refuses a ragged exchange where there is none."""
    if config.moe.exchange != "ragged":
        return
    if config.mesh.expert_nodes > 1:
        raise ConfigError(
            "config.moe.exchange: got ragged; allowed with mesh.expert_nodes"
            f" {config.mesh.expert_nodes}: padded, or None"
        )
    if mesh.shape["expert"] > 1 and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError(
            "config.moe.exchange: got ragged, which XLA has not for CPUs; allowed: padded, or None"
        )


def _divided(config):
    """(axis, field) for each size of the model that the devices of an axis share."""
    moe = config.moe
    fields = [("tensor", "model.num_heads"), ("fsdp", "model.width")]
    if moe.num_experts:
        fields += [("expert", "moe.num_experts"), ("tensor", "moe.expert_width")]
    if not moe.num_experts or moe.every > 1:  # there are blocks without experts
        fields.append(("tensor", "model.mlp_width"))
    return fields


def _make_parallel(config, mesh):
    nodes = config.mesh.expert_nodes
    ragged = nodes == 1 and _has_ragged_exchange(mesh.devices.flat[0])
    return expert_parallel_of(
        exchange=config.moe.exchange or ("ragged" if ragged else "padded"),
        num_nodes=nodes,
        capacity_scope=config.moe.capacity_scope,
    )


def _has_ragged_exchange(device):
    """XLA has none on CPU, and does not compile it for a whole pod of v5e."""
    return device.platform != "cpu" and device.device_kind not in ("TPU v5 lite", "TPU v5e")


def explain_backend(config: ConfigDict) -> str:
    """Who computes the experts of a single-run config with experts on this machine, in a line.

    Raises:
      ConfigError: the backend that the config names cannot.
    """
    method, implementation = make_method(config), config.moe.implementation
    if method.choice_type is not TokenChoice or implementation == "einsum":
        return "kernels: none, all products are XLA's"
    widths = (config.model.width, config.moe.expert_width)
    try:
        line = explain(config.model.dtype, widths, config.moe.backend).splitlines()[0]
    except ValueError as error:
        raise ConfigError(f"config.moe.{error}") from None
    return line if implementation == "dropless" else f"{line}; for the rows, the products are XLA's"


def make_method(config: ConfigDict) -> Router | None:
    """The routing method of all MoE layers; None for a dense model."""
    if not config.moe.num_experts:
        return None
    arguments = config.routers.get(config.router, {})
    return make_router(config.router, k=config.moe.k, **arguments)


def make_schedule(config: ConfigDict) -> optax.Schedule:
    """The learning rate over the steps of the run."""
    optimizer = config.optimizer
    return learning_rate_schedule(
        optimizer.learning_rate,
        steps=config.steps,
        warmup_steps=optimizer.warmup_steps,
        final_fraction=optimizer.final_fraction,
    )


def make_optimizer_of(config: ConfigDict) -> optax.GradientTransformation:
    """The optimizer with the schedule of ``make_schedule``."""
    optimizer = config.optimizer
    return make_optimizer(
        make_schedule(config),
        weight_decay=optimizer.weight_decay,
        b1=optimizer.b1,
        b2=optimizer.b2,
        clip_norm=optimizer.clip_norm,
    )


def make_weights(config: ConfigDict) -> AuxiliaryWeights:
    """The weights of the common router losses, the method's own where the config has None."""
    method = make_method(config)
    if method is None:
        return AuxiliaryWeights(load_balance=0.0, z=0.0)
    defaults = method.default_losses._asdict()
    weights = {
        name: default if config.losses[name] is None else config.losses[name]
        for name, default in defaults.items()
    }
    return AuxiliaryWeights(
        load_balance=weights["load_balance"] or 0.0,
        z=weights["z"] or 0.0,
        balance_choices=method.balance_choices,
        balance_per_sequence=config.losses.load_balance_scope == "sequence",
    )


def make_train_step_of(
    config: ConfigDict, model: LanguageModel, state_shardings: TrainState | None = None
) -> Callable:
    """The train step of a single-run config; see ``make_train_step``."""
    return make_train_step(
        model,
        make_optimizer_of(config),
        make_schedule(config),
        make_weights(config),
        accumulate_steps=config.optimizer.accumulate_steps,
        method=make_method(config),
        steps=config.steps,
        batch_axes=model.batch_axes,
        state_shardings=state_shardings,
    )


def make_initial_state(config: ConfigDict, model: LanguageModel) -> TrainState:
    """The state before the first step: it follows from the config's seed alone.

    Pure, so that ``jax.eval_shape`` of it gives the shapes without any work.
    """
    key, init_key = jax.random.split(jax.random.key(config.seed))
    # The parameters do not depend on the length, but a short sequence is quicker to trace.
    variables = model.init(init_key, jnp.zeros((1, 2), jnp.int32))
    skip = config.on_nonfinite == "skip"
    return initial_state(variables, make_optimizer_of(config), key, skip_nonfinite=skip)
