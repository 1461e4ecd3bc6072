"""What training carries from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Skipped(NamedTuple):
    """Steps whose loss or gradient was not finite, and whose update was therefore left out.

    Attributes:
      total: i32[], of the run so far.
      in_a_row: i32[], up to the last step; 0 if that one was finite.
    """

    total: jax.Array
    in_a_row: jax.Array


class TrainState(NamedTuple):
    """All that decides the rest of a run, but for the position in the data.

    Attributes:
      step: i32[], made so far, those with a skipped update too.
      params: nested dict of float32 arrays.
      router_state: what routing methods carry without a gradient, in the layout of params; {} where
        they carry nothing.
      opt_state: of the optimizer.
      key: u32[...], raw data of the key that every random number of the run derives from; it
        never changes, since each step folds its number in.
      skipped: None where a number that is not finite ends the run instead.
    """

    step: jax.Array
    params: Any
    router_state: dict
    opt_state: optax.OptState
    key: jax.Array
    skipped: Skipped | None = None

    @property
    def variables(self) -> dict:
        """What the model is applied with."""
        return {"params": self.params, "router_state": self.router_state}


def initial_state(
    variables: dict,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    skip_nonfinite: bool = False,
) -> TrainState:
    """The TrainState before the first step.

    Args:
      variables: of the model's ``init``: {"params": ..., perhaps "router_state": ...}.
      optimizer: of the parameters.
      key: a typed key (``jax.random.key``).
      skip_nonfinite: updates by numbers that are not finite are left out, and counted.
    """
    params = variables["params"]
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        variables.get("router_state", {}),
        optimizer.init(params),
        jax.random.key_data(key),
        Skipped(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)) if skip_nonfinite else None,
    )
