"""Experts spread over the devices of a mesh: rows travel to their experts and back.

Axis legend: T tokens in all, S shards of t tokens each, K slots, E experts, P devices that share
them, C capacity, d width, f expert width, R rows that one device may send to another.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moe_jax.dispatch.capacity import Priority, drop_over_capacity, positions
from moe_jax.dispatch.exchange import (
    EXCHANGES,
    NOWHERE,
    Exchange,
    ExchangeKind,
    padded_exchange,
    ragged_exchange,
)
from moe_jax.kernels.manual import vary_alike
from moe_jax.kernels.rows import assignment_of_row, from_rows, to_rows
from moe_jax.kernels.xla_rows import rank_in_expert
from moe_jax.routing import expert_counts

CapacityScope = Literal["batch", "shard"]
CAPACITY_SCOPES: tuple[str, ...] = get_args(CapacityScope)


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Which axes of the mesh of ``jax.set_mesh`` share the tokens and the experts of a layer.

    Attributes:
      token_axes: that the tokens are split over, in row-major order: the first is the slowest.
      expert_axis: that the experts are split over; one of ``token_axes``.
      tensor_axis: that the width f of every expert is split over; None: nothing is.
      exchange: "padded" sends blocks of the size of the worst case and runs everywhere; "ragged"
        sends the rows there are, on accelerators.
      num_nodes: the devices of ``expert_axis`` are so many nodes, see ``padded_exchange``.
      capacity_scope: whose tokens compete for the capacity of an expert. "batch": all T, so that
        nothing depends on the mesh. "shard": those of one shard by themselves, who then need not
        know of each other; the capacity is that of t tokens.

    Raises:
      ValueError: a field that does not fit the others.
    """

    token_axes: tuple[str, ...]
    expert_axis: str
    tensor_axis: str | None = None
    exchange: ExchangeKind = "padded"
    num_nodes: int = 1
    capacity_scope: CapacityScope = "batch"

    def __post_init__(self):
        for name, value, allowed in (
            ("expert_axis", self.expert_axis, self.token_axes),
            ("exchange", self.exchange, EXCHANGES),
            ("capacity_scope", self.capacity_scope, CAPACITY_SCOPES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}")
        if self.num_nodes > 1 and self.exchange == "ragged":
            raise ValueError(f"num_nodes: got {self.num_nodes}; allowed with ragged: 1")

    def num_shards(self) -> int:
        """S on the mesh at hand."""
        shape = jax.sharding.get_abstract_mesh().shape
        return math.prod(shape[axis] for axis in self.token_axes)


def expert_parallel_moe(
    x, expert, gate, experts, *, parallel, compute, capacity, priority, activation, backend
):
    """Sum over slots of gate times expert output; see ``moe`` for the arguments.

    Outputs and gradients are those of one device, up to rounding. What all devices share (weights,
    and x where f is split) comes in whole; the transpose of ``vary_alike`` is where its gradient is
    summed over the mesh.

    Args:
      x: [T, d]; T need not be a multiple of S.
      expert: i32[T, K].  gate: f32[T, K].  experts: weights, of E a multiple of P.
      parallel: an ExpertParallel; its axes are those of the mesh of ``jax.set_mesh``.
      compute: ``dropless_moe`` or ``sorted_moe``, for the rows that have arrived.
      capacity: C of the scope of ``parallel``; None: nobody is dropped.

    Returns:
      [T, d] of x's dtype, and i32[E], the drop counts.

    Raises:
      ValueError: there is no such mesh, E or f or the nodes do not fit it.
    """
    num_shards = _check(parallel, experts)
    num_experts, num_tokens = experts["w_in"].shape[0], x.shape[0]
    padding = -num_tokens % num_shards
    x, gate = (jnp.pad(array, ((0, padding), (0, 0))) for array in (x, gate))
    expert = jnp.pad(expert, ((0, padding), (0, 0)), constant_values=num_experts)

    def of_one_device(x, expert, gate, experts):
        dropped = jnp.zeros(num_experts, jnp.int32)
        if capacity is not None:
            position = _positions(expert, gate, num_experts, priority, parallel)
            expert, gate, dropped = drop_over_capacity(
                expert, gate, position, num_experts, capacity
            )
            dropped = jax.lax.psum(dropped, parallel.token_axes)
        experts = _biases_once(experts, parallel)
        options = dict(activation=activation, backend=backend)
        y = _with_exchange(
            x, expert, gate, experts, num_experts, parallel, compute, capacity, options
        )
        if parallel.tensor_axis is not None:
            y = jax.lax.psum(y, parallel.tensor_axis)
        return y.astype(x.dtype), dropped

    tokens, specs = PartitionSpec(parallel.token_axes), _weight_specs(experts, parallel)
    run = jax.shard_map(
        of_one_device,
        in_specs=(tokens, tokens, tokens, specs),
        out_specs=(tokens, PartitionSpec()),
        check_vma=backend.typed,
    )
    y, dropped = run(x, expert, gate, experts)
    return y[:num_tokens], dropped


def _with_exchange(x, expert, gate, experts, num_experts, parallel, compute, capacity, options):
    """Rows to the devices of their experts, through those, and back to their tokens."""
    num_devices = jax.lax.axis_size(parallel.expert_axis)
    num_local, num_slots = num_experts // num_devices, expert.shape[1]
    if num_devices == 1:
        position = _rank(expert, num_experts)
        most = x.shape[0] if capacity is None else capacity
        return compute(x, expert, gate, position, experts, capacity=most, **options)
    most_rows = x.shape[0] * min(num_slots, num_local)
    if capacity is not None:
        most_rows = min(most_rows, capacity * num_local)
    exchange = _exchange(expert.ravel() // num_local, parallel, most_rows)
    row = exchange.row.reshape(expert.shape)
    assignment = assignment_of_row(row, exchange.num_rows)
    x, gate, row, assignment = vary_alike(x, gate, row, assignment)

    def take(values, fill):
        return values.ravel().at[assignment].get(mode="fill", fill_value=fill)

    rows = exchange.send(to_rows(options["backend"], x, row, assignment), 0)
    # The gate travels too: where it is applied, no expert's output needs to be kept. As vectors,
    # since a TPU pads the columns of a matrix to 128, in blocks; ragged rows it pads in any case.
    gates = exchange.send(take(gate, 0), 0)[:, None]
    expert = jnp.where(expert < num_experts, expert % num_local, num_local)
    expert = exchange.send(take(expert, num_local), num_local)[:, None]
    most = rows.shape[0] if capacity is None else min(capacity * _crowds(parallel), rows.shape[0])
    position = _rank(expert, num_local)
    rows = compute(rows, expert, gates, position, experts, capacity=most, **options)
    rows = exchange.back(rows.astype(x.dtype))
    arrays = vary_alike(rows, jnp.ones_like(gate), row, assignment)
    return from_rows(options["backend"], *arrays)


def _exchange(destination, parallel, most_rows) -> Exchange:
    if parallel.exchange == "ragged":
        return ragged_exchange(destination, parallel.expert_axis, most_rows)
    return padded_exchange(
        destination, parallel.expert_axis, most_rows, num_nodes=parallel.num_nodes
    )


def _crowds(parallel):
    """How many sets of tokens, each with a capacity of its own, meet at an expert's device."""
    if parallel.capacity_scope == "batch":
        return 1
    return jax.lax.axis_size(parallel.expert_axis)


def _positions(expert, gate, num_experts, priority: Priority, parallel):
    """``positions`` among the tokens of the scope, of the tokens of this shard."""
    if parallel.capacity_scope == "shard":
        return positions(expert, num_experts, priority=priority, gate=gate)
    axes = parallel.token_axes
    shard = jax.lax.axis_index(axes)
    if priority == "gate":
        # The order of the tokens is not that of the shards.
        everyone = jax.lax.all_gather((expert, gate), axes, tiled=True)
        position = positions(everyone[0], num_experts, priority=priority, gate=everyone[1])
        return jax.lax.dynamic_slice_in_dim(position, shard * len(expert), len(expert))
    # In order of arrival all slots are one queue, else each slot is one, in turn.
    queues = expert.reshape(1, -1) if priority == "arrival" else expert.T
    rank = jax.vmap(lambda queue: rank_in_expert(queue, num_experts))(queues)
    counts = jax.vmap(lambda queue: expert_counts(queue, num_experts))(queues)
    counts = jax.lax.all_gather(counts, axes)  # [S, queues, E]
    total = jnp.sum(counts, axis=0)
    before = jnp.cumsum(total, axis=0) - total
    before += jnp.sum(jnp.where(jnp.arange(len(counts))[:, None, None] < shard, counts, 0), axis=0)
    queue = jnp.arange(len(queues))[:, None]
    position = rank + before[queue, jnp.minimum(queues, num_experts - 1)]
    position = position.reshape(expert.shape) if priority == "arrival" else position.T
    return jnp.where(expert < num_experts, position, NOWHERE)


def _rank(expert, num_experts):
    return rank_in_expert(expert.ravel(), num_experts).reshape(expert.shape)


def _biases_once(experts, parallel):
    """The bias of the output on one device alone of those whose outputs are added up."""
    if parallel.tensor_axis is None or "b_out" not in experts:
        return experts
    first = jax.lax.axis_index(parallel.tensor_axis) == 0
    return experts | {"b_out": jnp.where(first, experts["b_out"], 0)}


def _weight_specs(experts, parallel):
    expert, tensor = parallel.expert_axis, parallel.tensor_axis
    specs = {
        "w_in": PartitionSpec(expert, None, tensor),
        "w_gate": PartitionSpec(expert, None, tensor),
        "w_out": PartitionSpec(expert, tensor),
        "b_in": PartitionSpec(expert, tensor),
        "b_out": PartitionSpec(expert),
    }
    return {name: specs[name] for name in experts}


def _check(parallel, experts):
    """S, after a look at whether the mesh fits."""
    shape = jax.sharding.get_abstract_mesh().shape
    axes = {*parallel.token_axes, *filter(None, [parallel.tensor_axis])}
    if axes - set(shape):
        raise ValueError(
            f"parallel: got the axes {', '.join(sorted(axes))}; allowed: axes of the mesh of"
            f" jax.set_mesh, which has {', '.join(shape) or 'none'}"
        )
    num_experts, _, width = experts["w_in"].shape
    tensor = 1 if parallel.tensor_axis is None else shape[parallel.tensor_axis]
    for name, value, divisor in (
        ("experts", num_experts, shape[parallel.expert_axis]),
        ("expert width", width, tensor),
        ("devices of the expert axis", shape[parallel.expert_axis], parallel.num_nodes),
    ):
        if value % divisor:
            raise ValueError(f"{name}: got {value}; allowed on this mesh: multiples of {divisor}")
    return parallel.num_shards()
