"""The mesh of devices, and what of a model lies where: one table from paths to mesh axes.

A path ends in the names of a parameter's module and of the parameter itself, in parameters as in
the moments of an optimizer. The table gives every dimension a logical axis, and another one says
which mesh axis shares that. Dimensions before the ones in the table, as scanned layers have them,
are whole everywhere.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moe_jax.dispatch import ExpertParallel

# The major axis first: devices that differ in the last one are neighbours.
AXES = ("data", "fsdp", "expert", "tensor")
# All that compute with tokens of their own.
BATCH_AXES = ("data", "fsdp", "expert")

# Logical axis -> mesh axis.
LOGICAL_AXES = {
    "width": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    None: None,
}

# The first pattern found in a path counts. Everything of a router is small, and whole everywhere.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"router/", ()),
    (r"tokens/embedding", ("vocab", "width")),
    (r"head/kernel", ("width", "vocab")),
    (r"attention/(query|key|value)/kernel", ("width", "heads")),
    (r"attention/out/kernel", ("heads", "width")),
    (r"experts/(w_in|w_gate)", ("expert", "width", "hidden")),
    (r"experts/w_out", ("expert", "hidden", "width")),
    (r"experts/b_in", ("expert", "hidden")),
    (r"experts/b_out", ("expert", None)),
    (r"(feed_forward|shared)/(in|gate)/kernel", ("width", "hidden")),
    (r"(feed_forward|shared)/out/kernel", ("hidden", "width")),
    (r"(feed_forward|shared)/in/bias", ("hidden",)),
    (r"(feed_forward|shared)/out/bias", (None,)),
    (r"norm/scale", ()),
)


class MeshError(ValueError):
    """Sizes of a mesh that do not fit; the message names the field, its value and the remedy."""


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The mesh of all devices with the axes AXES, for ``jax.set_mesh``.

    Args:
      data: copies of the model; None: as many as there are devices left.
      fsdp: devices that share the width of every matrix of a copy, and its moments.
      expert: devices that share the experts.
      tensor: devices that share heads, hidden units and vocabulary, and see the same tokens.
      devices: None: all of this run's. With fewer than all in use, the first ones.

    Raises:
      MeshError: more devices wanted than there are, or ``data`` is None and they do not divide.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(data=data, fsdp=fsdp, expert=expert, tensor=tensor)
    shared = fsdp * expert * tensor
    product = f"fsdp {fsdp} x expert {expert} x tensor {tensor} = {shared}"
    if data is None:
        if len(devices) % shared:
            raise MeshError(
                f"mesh: got {product} for {len(devices)} devices; allowed: sizes whose product"
                f" divides {len(devices)}, or data set to use fewer devices"
            )
        sizes["data"] = len(devices) // shared
    num_devices = math.prod(sizes.values())
    if num_devices > len(devices):
        raise MeshError(
            f"mesh: got data {data} x {product if data == 1 else f'{product} = {num_devices}'}"
            f" devices; there are {len(devices)}; allowed: smaller sizes, or more devices"
        )
    if num_devices < len(devices) and jax.process_count() > 1:
        raise MeshError(
            f"mesh: got {num_devices} of {len(devices)} devices; allowed with"
            f" {jax.process_count()} processes: all of them, such as data"
            f" {len(devices) // shared}"
        )
    # With all devices jax may order them by their places in the network.
    used = devices[:num_devices]
    array = np.array(used).reshape(tuple(sizes.values()))
    if num_devices == len(devices) and used[0].platform == "tpu":
        from jax.experimental import mesh_utils

        # An axis of 8 on a torus of 4x4x4 takes one side and half of another.
        array = mesh_utils.create_device_mesh(
            tuple(sizes.values()), used, allow_split_physical_axes=True
        )
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def expert_parallel_of(**options) -> ExpertParallel:
    """The ExpertParallel of the axes of this module; ``options`` are its other fields."""
    return ExpertParallel(
        token_axes=BATCH_AXES, expert_axis="expert", tensor_axis="tensor", **options
    )


def num_batch_shards(mesh: Mesh) -> int:
    """How many devices have sequences of their own."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays whose first dimension is that of sequences."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of what every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """Where each array of a tree of parameters, router state or optimizer state lies.

    Args:
      tree: of arrays or ``jax.ShapeDtypeStruct``; scalars and keys are whole everywhere.
      mesh: of ``make_mesh``.

    Returns:
      The tree with a NamedSharding for each leaf. A vocabulary that is no multiple of "tensor" is
      whole everywhere.

    Raises:
      MeshError: an array without a rule, or a size that is no multiple of its mesh axis.
    """

    def place(path, leaf):
        return NamedSharding(mesh, _spec(_path_name(path), leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def _spec(path, shape, mesh_shape):
    if not path or len(shape) < 1:
        return PartitionSpec()
    rule = next((axes for pattern, axes in RULES if re.search(pattern, path)), None)
    if rule is None:
        raise MeshError(f"{path}: got an array {list(shape)}; allowed: a path with a rule in RULES")
    axes = [None] * (len(shape) - len(rule)) + [LOGICAL_AXES[name] for name in rule]
    for dimension, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis is None or size % mesh_shape[axis] == 0:
            continue
        logical = rule[dimension - len(shape) + len(rule)]
        if logical != "vocab":
            raise MeshError(
                f"mesh.{axis}: got {mesh_shape[axis]}, but {logical} of {path} is {size}; allowed:"
                f" divisors of {size}"
            )
        axes[dimension] = None
    return PartitionSpec(*axes)


def _path_name(path):
    """The names of dicts in a path, since lists and tuples are an optimizer's own."""
    return "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
