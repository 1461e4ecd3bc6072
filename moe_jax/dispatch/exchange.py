"""Rows from the devices that have the tokens to those that have the experts, and back.

All of it runs inside ``jax.shard_map``; the devices of one group are those along one mesh axis.

Axis legend: P devices in a group, N rows that a device sends, R rows that it may send to one other.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from moe_jax.kernels.xla_rows import rank_in_expert
from moe_jax.routing import expert_counts

ExchangeKind = Literal["padded", "ragged"]
EXCHANGES: tuple[str, ...] = get_args(ExchangeKind)
# Past the end of every buffer.
NOWHERE = jnp.iinfo(jnp.int32).max

# Options of XLA, by platform, with which a program goes on computing while rows travel: what does
# not wait for them, such as shared experts, is scheduled in between.
OVERLAP_OPTIONS = {
    "tpu": {"xla_tpu_enable_async_all_to_all": True},
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}


class Exchange(NamedTuple):
    """How the rows of one layer travel.

    Attributes:
      num_rows: rows of the buffer that a device sends from.
      row: i32[N], the row of each item in that buffer, NOWHERE for one that is not sent.
      send: (buffer [num_rows, ...], fill) -> what this device receives, [P*R, ...], with ``fill``
        in rows that nobody sent.
      back: ([P*R, ...]) -> [num_rows, ...], every row where ``send`` took it from.
    """

    num_rows: int
    row: jax.Array
    send: Callable[[jax.Array, float], jax.Array]
    back: Callable[[jax.Array], jax.Array]


def padded_exchange(
    destination: jax.Array, axis: str, most_rows: int, *, num_nodes: int = 1
) -> Exchange:
    """One block of R rows for every device of the group, whatever is in it: an all-to-all.

    Args:
      destination: i32[N], the device that each item goes to; P or more for one that is not sent.
      axis: of the group.
      most_rows: R, at least as many as any device has for any other.
      num_nodes: the group is so many nodes of P / num_nodes neighbours each. With more than one the
        exchange has two hops, first within the nodes and then between the devices of the same place
        in their nodes: fewer and larger messages on the slow links.
    """
    num_devices = jax.lax.axis_size(axis)
    place = rank_in_expert(jnp.minimum(destination, num_devices), num_devices)
    row = jnp.where(destination < num_devices, destination * most_rows + place, NOWHERE)
    num_rows = num_devices * most_rows

    def swap(buffer):
        if num_nodes == 1:
            return jax.lax.all_to_all(buffer, axis, 0, 0, tiled=True)
        within, between = _hops(num_devices, num_nodes)
        blocks = buffer.reshape(num_nodes, num_devices // num_nodes, most_rows, *buffer.shape[1:])
        for dimension, groups in ((1, within), (0, between)):
            blocks = jax.lax.all_to_all(
                blocks, axis, dimension, dimension, axis_index_groups=groups, tiled=True
            )
        return blocks.reshape(buffer.shape)

    # What is not an item's row has been filled by the sender.
    return Exchange(num_rows, row, lambda buffer, fill: swap(buffer), swap)


def ragged_exchange(destination: jax.Array, axis: str, most_rows: int) -> Exchange:
    """Only the rows there are, one after the other: ``jax.lax.ragged_all_to_all``.

    Not on CPU, where XLA has none. See ``padded_exchange`` for the arguments.
    """
    num_devices, num_items = jax.lax.axis_size(axis), destination.shape[0]
    here = jax.lax.axis_index(axis)
    destination = jnp.minimum(destination, num_devices)
    send_sizes = expert_counts(destination, num_devices)
    start = jnp.cumsum(send_sizes) - send_sizes
    place = rank_in_expert(destination, num_devices)
    sent = destination < num_devices
    row = jnp.where(sent, start[jnp.minimum(destination, num_devices - 1)] + place, NOWHERE)
    sizes = jax.lax.all_gather(send_sizes, axis)  # [sender, receiver]
    receive_sizes = sizes[:, here]
    arrival = jnp.cumsum(receive_sizes) - receive_sizes
    # Where the rows of this device begin at each receiver, and those of this receiver at each
    # sender.
    begin = (jnp.cumsum(sizes, axis=0) - sizes)[here]
    origin = (jnp.cumsum(sizes, axis=1) - sizes)[:, here]

    def swap(buffer, out, *offsets_and_sizes):
        return jax.lax.ragged_all_to_all(buffer, out, *offsets_and_sizes, axis_name=axis)

    def full(buffer, num_rows, fill):
        return jax.lax.full_like(buffer, fill, shape=(num_rows, *buffer.shape[1:]))

    def send(buffer, fill):
        out = full(buffer, num_devices * most_rows, fill)
        return swap(buffer, out, start, send_sizes, begin, receive_sizes)

    def back(buffer):
        return swap(buffer, full(buffer, num_items, 0), arrival, receive_sizes, origin, send_sizes)

    return Exchange(num_items, row, send, back)


def _hops(num_devices, num_nodes):
    """The groups of devices within a node, and across nodes, of each hop."""
    neighbours = num_devices // num_nodes
    within = [[n * neighbours + i for i in range(neighbours)] for n in range(num_nodes)]
    return within, [list(group) for group in zip(*within, strict=True)]
