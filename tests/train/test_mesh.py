"""A training step on any mesh is the step of one device: loss, gradients, counts, routers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.routing import TokenChoice
from moe_jax.sharding import make_mesh
from moe_jax.train.build import make_method, make_model, make_weights
from moe_jax.train.placement import Placement
from moe_jax.train.state import initial_state
from moe_jax.train.step import make_train_step

MESHES = {
    "data 8": dict(data=8),
    "data 2 expert 4": dict(data=2, expert=4),
    "expert 8": dict(data=1, expert=8),
    "fsdp 4 expert 2": dict(data=1, fsdp=4, expert=2),
    "data 2 fsdp 2 tensor 2": dict(data=2, fsdp=2, tensor=2),
}
# By name: the config's changes.
RUNS = {
    "softmax": {},
    "bias and drops": {
        "router": "sigmoid_top_k",
        "moe.implementation": "sorted",
        "moe.capacity_factor": 0.75,
        "moe.priority": "first_choice",
        "moe.num_shared_experts": 1,
        "model.use_bias": True,
        "optimizer.accumulate_steps": 2,
        "model.scan_layers": True,
        "model.num_layers": 2,
        "model.remat": True,
    },
    "smooth": {"router": "smooth_top_k", "moe.capacity_factor": 0.5, "model.glu": True},
    "balance of sequences": {"losses.load_balance_scope": "sequence", "moe.k": 1},
    "experts choose": {"router": "expert_choice", "moe.allow_future_leak": True},
    "noise and dropout": {"router": "noisy_top_k", "model.dropout": 0.2, "moe.input_jitter": 0.1},
}
BATCH, LENGTH, VOCABULARY = 16, 6, 32


@pytest.fixture(scope="module")
def on_one_device():
    """By name, kept from test to test."""
    return {}


@pytest.fixture
def run_of(tiny):
    def make(name):
        common = {
            "data.batch_size": BATCH,
            "data.sequence_length": LENGTH,
            "moe.num_experts": 8,
            "moe.expert_width": 12,
            "moe.implementation": "dropless",
            "model.num_layers": 1,
            "moe.backend": "reference",  # compiles quickly
            "losses.load_balance": 0.5,
        }
        return tiny(**common | RUNS[name])

    return make


def batch_with_padding():
    """The last sequences are short, one is empty."""
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY)
    lengths = jnp.array([LENGTH] * (BATCH - 4) + [1, 2, 0, 5])
    return {"tokens": tokens, "valid": jnp.arange(LENGTH) < lengths[:, None]}


def two_steps(run, mesh):
    """States and metrics after each of two steps of gradient descent with a clipped norm."""
    placement = Placement(mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(1.0, momentum=0.9))
    with placement.active():
        model = make_model(run, VOCABULARY, mesh)

        def first():
            variables = model.init(jax.random.key(2), jnp.zeros((1, 2), jnp.int32))
            return initial_state(variables, optimizer, jax.random.key(3))

        shardings = placement.shardings(jax.eval_shape(first))
        state = jax.jit(first, out_shardings=shardings)()
        step = make_train_step(
            model,
            optimizer,
            lambda count: 1.0,
            make_weights(run),
            accumulate_steps=run.optimizer.accumulate_steps,
            method=make_method(run),
            steps=10,
            batch_axes=model.batch_axes,
            state_shardings=shardings,
        )
        batch = batch_with_padding()
        batch = placement.put(
            {name: np.asarray(x) for name, x in batch.items()}, range(BATCH), BATCH
        )
        results = [jax.device_get(state.params)]
        if mesh is not None:
            exchanged = make_method(run).choice_type is TokenChoice
            assert_spread(step, state, batch, mesh, exchanged)
        for _ in range(2):
            state, metrics = step(state, batch)
            results.append(jax.device_get((state, metrics)))
    return results


def assert_spread(step, state, batch, mesh, exchanged):
    """The program exchanges rows if and only if experts are shared, and holds parts of them."""
    blocks = state.params["scanned_blocks" if "scanned_blocks" in state.params else "blocks"]
    w_in = blocks["block_0"]["feed_forward"]["experts"]["w_in"]
    whole, part = w_in.shape, w_in.sharding.shard_shape(w_in.shape)
    sizes = [mesh.shape[axis] for axis in ("expert", "fsdp", "tensor")]
    assert [n // m for n, m in zip(whole[-3:], part[-3:], strict=True)] == sizes
    assert ("all_to_all" in step.lower(state, batch).as_text()) == (exchanged and sizes[0] > 1)


def assert_same(got, expected):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if np.issubdtype(np.asarray(b).dtype, np.integer):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            largest = max(float(np.max(np.abs(b))), 1e-3)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest, err_msg=name)


ON_EVERY_MESH = ("softmax", "bias and drops")
FIRST = [("softmax", "data 2 fsdp 2 tensor 2"), ("bias and drops", "data 2 expert 4")]
CASES = [(name, mesh) for name in ON_EVERY_MESH for mesh in MESHES]
CASES += [(name, "data 2 expert 4") for name in RUNS if name not in ON_EVERY_MESH]
CASES = [case if case in FIRST else pytest.param(*case, marks=pytest.mark.sweep) for case in CASES]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_step_is_that_of_one_device(name, mesh, run_of, on_one_device):
    run = run_of(name)
    if name not in on_one_device:
        on_one_device[name] = two_steps(run, None)
    start, *expected = on_one_device[name]
    got_start, *got = two_steps(run, make_mesh(**MESHES[mesh]))
    jax.tree.map(np.testing.assert_array_equal, got_start, start)
    for one, many in zip(expected, got, strict=True):
        assert_same(many, one)
    metrics = expected[0][1]
    assert metrics.gradient_norm > 0.3  # it was clipped
    dropped = np.sum(metrics.routing.dropped)
    assert (dropped > 0) == (run.moe.capacity_factor is not None)
    assert np.sum(metrics.routing.load) > 0


@pytest.mark.sweep
def test_the_capacity_of_a_shard_is_that_of_a_microbatch(run_of):
    """Eight devices with two sequences each, and one device with eight microbatches of two."""
    run = run_of("bias and drops")
    run.moe.update(capacity_factor=0.5, priority="gate")
    run.losses.update(load_balance=0.0, z=0.0)  # of a batch and of microbatches they differ
    run.optimizer.accumulate_steps = 8
    _, *expected = two_steps(run, None)
    run.optimizer.accumulate_steps = 1
    run.moe.capacity_scope = "shard"
    _, *got = two_steps(run, make_mesh(data=2, expert=4))
    for (state, metrics), (one_state, one_metrics) in zip(got, expected, strict=True):
        assert_same(state, one_state)
        np.testing.assert_array_equal(metrics.routing.dropped, one_metrics.routing.dropped)
        np.testing.assert_allclose(metrics.loss, one_metrics.loss, rtol=1e-5)
    assert np.sum(got[0][1].routing.dropped) > 0
