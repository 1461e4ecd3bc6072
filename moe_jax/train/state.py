"""What training carries from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class TrainState(NamedTuple):
    """All that decides the rest of a run, but for the position in the data.

    Attributes:
      step: i32[], updates made so far.
      params: nested dict of float32 arrays.
      opt_state: of the optimizer.
      key: u32[...], raw data of the key that every random number of the run derives from; it
        never changes, since each step folds its number in.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    key: jax.Array


def initial_state(params: Any, optimizer: optax.GradientTransformation, key: jax.Array):
    """The TrainState before the first step. ``key`` is a typed key (``jax.random.key``)."""
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(key)
    )
