"""The sharded train step of a config, compiled from shapes alone."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from moe_jax.compiling.topology import Topology, TopologyError, devices_of
from moe_jax.kernels.targets import as_default_device
from moe_jax.sharding import make_mesh
from moe_jax.train.build import (
    explain_backend,
    make_initial_state,
    make_model,
    make_run_mesh,
    make_train_step_of,
    vocabulary_of,
)
from moe_jax.train.placement import Placement
from moe_jax.train.state import TrainState


class Program(NamedTuple):
    """A compiled train step.

    Attributes:
      compiled: what jax gives.
      state: the TrainState's shapes with their places.
      mesh: that it runs on.
      backend: who computes the experts, in a line; "" for a dense model.
      seconds: that the compiler took.
    """

    compiled: jax.stages.Compiled
    state: TrainState
    mesh: Mesh
    backend: str
    seconds: float


def compile_train_step(
    config: ConfigDict, topology: Topology, say: Callable[[str], None]
) -> Program:
    """Compiles the train step of a single-run config for a topology.

    Args:
      config: validated.
      topology: all of whose devices are to be used.
      say: is told what is being done.

    Raises:
      TopologyError: the mesh leaves devices out, or there are none to be had.
      ConfigError: the mesh does not fit the config, or a kernel does not.
      jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    devices = devices_of(topology)
    mesh = make_run_mesh(config, devices)
    _check_size(mesh, topology, len(devices))
    # A run on one device has a model that knows of no mesh.
    place = Placement(mesh or make_mesh(data=1, devices=devices))
    with as_default_device(devices[0]), place.active():
        backend = explain_backend(config) if config.moe.num_experts else ""
        model = make_model(config, vocabulary_of(config), mesh)
        shapes = jax.eval_shape(lambda: make_initial_state(config, model))
        state = place.shapes(shapes)
        step = make_train_step_of(config, model, place.shardings(shapes))
        shape = (config.data.batch_size, config.data.sequence_length + 1)
        batch = place.batch_shapes({"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)})
        say("tracing the train step")
        lowered = step.trace(state, batch).lower(lowering_platforms=(topology.platform,))
        say(f"compiling it for {len(devices)} devices of {topology.name}; {backend}")
        began = time.perf_counter()
        # As the trainer compiles it, so that this is the program that will run.
        compiled = lowered.compile(compiler_options=place.compiler_options())
    return Program(compiled, state, place.mesh, backend, time.perf_counter() - began)


def bytes_per_device(tree: Any) -> int:
    """Of shapes with places, as ``Program.state`` has them."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _check_size(mesh, topology, num_devices):
    used = 1 if mesh is None else mesh.size
    if used != num_devices:
        raise TopologyError(
            f"config.mesh: got {used} of the {num_devices} devices of {topology.name}; allowed:"
            " all of them (config.mesh.data=None takes what the others leave)"
        )
