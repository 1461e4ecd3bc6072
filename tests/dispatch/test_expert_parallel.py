"""Every mesh gives what one device gives: outputs, drop counts and every gradient."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from moe_jax.dispatch import ExpertParallel, capacity, moe
from moe_jax.dispatch.exchange import NOWHERE, padded_exchange
from moe_jax.dispatch.expert_parallel import _positions
from moe_jax.kernels import reference
from moe_jax.routing import TokenChoice, softmax_top_k

NAMES = ("data", "fsdp", "expert", "tensor")
TOKENS = ("data", "fsdp", "expert")
MESHES = {
    "data 8": (8, 1, 1, 1),
    "data 2 expert 4": (2, 1, 4, 1),
    "expert 8": (1, 1, 8, 1),
    "fsdp 4 expert 2": (1, 4, 2, 1),
    "data 2 fsdp 2 tensor 2": (2, 2, 1, 2),
    "expert 2 tensor 2": (1, 1, 2, 2),
    "one device": (1, 1, 1, 1),
}
FIRST = "data 2 expert 4"
ON_EVERY_MESH = [("dropless", None, "arrival", False), ("sorted", 0.75, "arrival", True)]
CASES = [(FIRST, "dropless", 0.5, "first_choice", True), (FIRST, "sorted", 0.5, "gate", False)]
CASES += [
    (mesh, *case) if mesh == FIRST else pytest.param(mesh, *case, marks=pytest.mark.sweep)
    for mesh in MESHES
    for case in ON_EVERY_MESH
]
T, D, F, E, K = 37, 8, 12, 8, 2  # T is no multiple of any number of shards


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(quick_compilation):
    """The programs are many and small."""


def mesh_of(sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, NAMES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def parallel_of(**changes):
    axes = dict(token_axes=TOKENS, expert_axis="expert", tensor_axis="tensor")
    return ExpertParallel(**axes | changes)


def inputs(seed=0, *, glu=True, bias=True, skewed=False, num_tokens=T):
    """Tokens with a fifth of them invalid, logits, experts."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape) * 0.5  # noqa: E731
    experts = {"w_in": draw(E, D, F), "w_out": draw(E, F, D)}
    if glu:
        experts["w_gate"] = draw(E, D, F)
    if bias:
        experts |= {"b_in": draw(E, F), "b_out": draw(E, D)}
    logits = draw(num_tokens, E)
    if skewed:  # experts 0 and 1 alone, so that most devices send and get nothing
        logits = logits.at[:, :2].add(20.0)
    return draw(num_tokens, D), logits, experts, jnp.arange(num_tokens) % 5 != 3


def loss(x, logits, experts, valid, **options):
    routing = softmax_top_k(logits, K, valid=valid)
    y, dropped = moe(x, routing, experts, **options)
    weight = jnp.cos(jnp.arange(y.size).reshape(y.shape))  # another one for every number
    return jnp.sum(y * weight), (y, dropped)


def value_and_gradients(mesh, arrays, **options):
    function = jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2), has_aux=True)
    with jax.set_mesh(mesh):
        return jax.jit(function)(*arrays)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        largest = max(float(jnp.max(jnp.abs(b))), 1.0)
        np.testing.assert_allclose(a, b, atol=1e-5 * largest, rtol=0, err_msg=str(path))


@functools.cache
def on_one_device(implementation, factor, priority, skewed):
    most = None if factor is None else capacity(T, E, K, factor)
    options = dict(implementation=implementation, capacity=most, priority=priority)
    options["backend"] = "reference"
    return jax.value_and_grad(functools.partial(loss, **options), (0, 1, 2), has_aux=True)(
        *inputs(skewed=skewed)
    )


@pytest.mark.parametrize(("mesh", "implementation", "factor", "priority", "skewed"), CASES)
def test_every_mesh_is_one_device(mesh, implementation, factor, priority, skewed):
    got = value_and_gradients(
        mesh_of(MESHES[mesh]),
        inputs(skewed=skewed),
        implementation=implementation,
        capacity=None if factor is None else capacity(T, E, K, factor),
        priority=priority,
        backend="reference",
        parallel=parallel_of(),
    )
    expected = on_one_device(implementation, factor, priority, skewed)
    dropped = expected[0][1][1]
    assert (factor is None) == (int(jnp.sum(dropped)) == 0)
    np.testing.assert_array_equal(got[0][1][1], dropped)
    assert_same(got, expected)


def test_the_loops_for_cpus_on_a_mesh():
    got = value_and_gradients(
        mesh_of((1, 1, 4, 2)), inputs(), backend="xla_cpu", parallel=parallel_of()
    )
    assert_same(got, on_one_device("dropless", None, "arrival", False))


def test_without_the_types_of_shard_map(monkeypatch):
    """As the kernels for GPUs need it."""
    untyped = reference.BACKEND._replace(name="mosaic_gpu")
    module = sys.modules["moe_jax.dispatch.moe"]  # the package has a function of that name
    monkeypatch.setattr(module, "select", lambda *_: untyped)
    got = value_and_gradients(mesh_of((2, 1, 2, 2)), inputs(), parallel=parallel_of())
    assert_same(got, on_one_device("dropless", None, "arrival", False))


def test_two_hops_are_one():
    mesh, arrays = mesh_of((1, 1, 8, 1)), inputs()
    for num_nodes in (2, 4):
        parallel = parallel_of(num_nodes=num_nodes)
        got = value_and_gradients(mesh, arrays, backend="reference", parallel=parallel)
        assert_same(got, on_one_device("dropless", None, "arrival", False))


def test_more_tokens_than_shards_are_not_needed():
    """Five tokens on eight devices, all of them invalid or not."""
    mesh = mesh_of((2, 1, 4, 1))
    for valid in (jnp.arange(5) < 3, jnp.zeros(5, bool)):
        arrays = (*inputs(num_tokens=5)[:3], valid)
        got = value_and_gradients(mesh, arrays, backend="reference", parallel=parallel_of())
        one = functools.partial(loss, backend="reference")
        expected = jax.value_and_grad(one, (0, 1, 2), has_aux=True)(*arrays)
        assert_same(got, expected)


def test_capacity_of_a_shard():
    """Eight shards of 4 tokens; each keeps 2 of its 4 assignments, all of expert 0."""
    mesh, num_tokens = mesh_of((2, 1, 4, 1)), 32
    x, _, experts, _ = inputs(num_tokens=num_tokens)
    expert = jnp.zeros((num_tokens, 1), jnp.int32)
    gate = jnp.ones((num_tokens, 1))
    routing = TokenChoice(expert, gate, jnp.zeros((num_tokens, E)), jnp.zeros((num_tokens, E)))
    kept = jnp.arange(num_tokens) % 4 < 2
    for implementation in ("dropless", "sorted"):
        expected, _ = moe(x, routing._replace(expert=jnp.where(kept[:, None], 0, E)), experts)
        with jax.set_mesh(mesh):
            y, dropped = jax.jit(
                functools.partial(
                    moe,
                    implementation=implementation,
                    capacity=2,
                    backend="reference",
                    parallel=parallel_of(capacity_scope="shard"),
                )
            )(x, routing, experts)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        assert dropped.tolist() == [16, *[0] * (E - 1)]


def slow_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What ``jax.lax.ragged_all_to_all`` does, for CPUs: everybody sees everything."""
    here = jax.lax.axis_index(axis_name)
    operands = jax.lax.all_gather(operand, axis_name)  # [P, N, ...]
    starts, sizes, places = (
        jax.lax.all_gather(x, axis_name)[:, here]
        for x in (input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])[:, None]
    mine = (row >= places) & (row < places + sizes)  # [M, P]
    sender = jnp.argmax(mine, axis=1)
    index = starts[sender] + row[:, 0] - places[sender]
    taken = operands[sender, jnp.clip(index, 0, operand.shape[0] - 1)]
    written = jnp.any(mine, axis=1).reshape(-1, *[1] * (operand.ndim - 1))
    # The receiver knows how much will come.
    taken = jnp.where(jnp.all(sizes == recv_sizes), taken, jnp.zeros_like(taken) - 1)
    return jnp.where(written, taken, output)


@pytest.mark.parametrize(
    ("implementation", "factor", "priority", "skewed"),
    [("dropless", None, "arrival", False), ("sorted", 0.75, "arrival", True)],
)
def test_a_ragged_exchange(monkeypatch, implementation, factor, priority, skewed):
    """Its offsets and sizes, on devices that have no such collective."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", slow_ragged_all_to_all)
    got = value_and_gradients(
        mesh_of((2, 1, 4, 1)),
        inputs(skewed=skewed),
        implementation=implementation,
        capacity=None if factor is None else capacity(T, E, K, factor),
        priority=priority,
        backend="reference",
        parallel=parallel_of(exchange="ragged"),
    )
    assert_same(got, on_one_device(implementation, factor, priority, skewed))


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_an_exchange_and_back_is_the_identity(num_nodes):
    """Items tagged (device, index); device 3 sends nothing, nobody sends to device 0."""
    num_devices, num_items = 4, 6

    def tagged(destination):
        here = jax.lax.axis_index("expert")
        tags = jnp.stack([jnp.full(num_items, here), jnp.arange(num_items)], axis=1) + 1
        exchange = padded_exchange(destination, "expert", num_items, num_nodes=num_nodes)
        buffer = jnp.zeros((exchange.num_rows, 2), jnp.int32)
        buffer = buffer.at[exchange.row].set(tags, mode="drop")
        there = exchange.send(buffer, 0)
        back = exchange.back(there).at[exchange.row].get(mode="fill", fill_value=0)
        return tags, there, back

    destination = jnp.array([[1, 3, 1, 1, 2, 4], [2] * 6, [3, 2, 1, 3, 2, 1], [4] * 6])
    over = PartitionSpec("expert")
    with jax.set_mesh(mesh_of((1, 1, num_devices, 1))):
        run = jax.jit(jax.shard_map(tagged, in_specs=over, out_specs=over))
        tags, there, back = run(destination.reshape(-1))
    sent = (destination < num_devices).reshape(-1, 1)
    np.testing.assert_array_equal(back, jnp.where(sent, tags, 0))
    there = np.asarray(there).reshape(num_devices, -1, 2)
    for device in range(num_devices):
        got = {tuple(tag) for tag in there[device] if tag.any()}
        wanted = {
            (sender + 1, item + 1)
            for sender in range(num_devices)
            for item in range(num_items)
            if destination[sender, item] == device
        }
        assert got == wanted


@pytest.mark.parametrize("priority", ["arrival", "first_choice", "gate"])
def test_positions_over_shards(priority):
    from moe_jax.dispatch import positions

    num_tokens = 24
    _, logits, _, valid = inputs(num_tokens=num_tokens)
    routing = softmax_top_k(logits, K, valid=valid[:num_tokens])
    expected = positions(routing.expert, E, priority=priority, gate=routing.gate)
    over = PartitionSpec(TOKENS)
    with jax.set_mesh(mesh_of((2, 1, 4, 1))):
        got = jax.jit(
            jax.shard_map(
                lambda expert, gate: _positions(expert, gate, E, priority, parallel_of()),
                in_specs=over,
                out_specs=over,
            )
        )(routing.expert, routing.gate)
    there = np.asarray(routing.expert) < E
    np.testing.assert_array_equal(np.asarray(got)[there], np.asarray(expected)[there])
    assert np.all(np.asarray(got)[~there] >= num_tokens * K)
    assert NOWHERE > 2**30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(expert_axis="tensor"), "expert_axis: got 'tensor'; allowed: data, fsdp, expert"),
        (dict(exchange="carrier"), "exchange: got 'carrier'; allowed: padded, ragged"),
        (dict(capacity_scope="node"), "capacity_scope: got 'node'; allowed: batch, shard"),
        (dict(num_nodes=2, exchange="ragged"), "num_nodes: got 2; allowed with ragged: 1"),
    ],
)
def test_bad_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        parallel_of(**changes)


def test_a_mesh_that_does_not_fit():
    x, logits, experts, _ = inputs()
    routing = softmax_top_k(logits, K)
    six = {name: weight[:6] for name, weight in experts.items()}
    sixth = softmax_top_k(logits[:, :6], K)
    narrow = {"w_in": experts["w_in"][..., :11], "w_out": experts["w_out"][:, :11]}
    with pytest.raises(ValueError, match="'shard'; allowed with einsum: batch"):
        parallel = parallel_of(capacity_scope="shard")
        moe(x, routing, experts, implementation="einsum", capacity=2, parallel=parallel)
    with pytest.raises(ValueError, match="jax.set_mesh, which has none"):
        moe(x, routing, experts, parallel=parallel_of())
    for mesh, arrays, changes, message in (
        ((1, 1, 4, 1), (sixth, six), {}, "experts: got 6; allowed on this mesh: multiples of 4"),
        ((1, 1, 1, 2), (routing, narrow), {}, "expert width: got 11; allowed .* multiples of 2"),
        ((1, 1, 4, 1), (routing, experts), dict(num_nodes=3), "got 4; allowed .* multiples of 3"),
    ):
        with jax.set_mesh(mesh_of(mesh)), pytest.raises(ValueError, match=message):
            moe(x, *arrays, parallel=parallel_of(**changes))
