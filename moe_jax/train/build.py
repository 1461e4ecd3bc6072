"""From a config to the things it names: the only place that maps fields to modules."""

import functools

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from moe_jax.config import ConfigError
from moe_jax.kernels import explain
from moe_jax.layers import Mlp, MoE
from moe_jax.models.language_model import LanguageModel
from moe_jax.routing import Router, TokenChoice, make_router
from moe_jax.train.optimizer import learning_rate_schedule, make_optimizer
from moe_jax.train.state import TrainState, initial_state
from moe_jax.train.step import AuxiliaryWeights


def make_model(config: ConfigDict, vocab_size: int) -> LanguageModel:
    """The model of a single-run config (``moe_jax.config.resolve_runs``).

    Args:
      config: validated.
      vocab_size: of the tokenizer.
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
    )


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


def make_initial_state(config: ConfigDict, model: LanguageModel) -> TrainState:
    """The state before the first step: it follows from the config's seed alone.

    Pure, so that ``jax.eval_shape`` of it gives the shapes without any work.
    """
    key, init_key = jax.random.split(jax.random.key(config.seed))
    # The parameters do not depend on the length, but a short sequence is quicker to trace.
    variables = model.init(init_key, jnp.zeros((1, 2), jnp.int32))
    return initial_state(variables, make_optimizer_of(config), key)
