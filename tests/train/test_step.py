import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.config import config_from_json, config_to_json
from moe_jax.models import stack_routers
from moe_jax.routing import load_balance_loss, z_loss
from moe_jax.train.build import make_initial_state, make_method, make_model
from moe_jax.train.state import initial_state
from moe_jax.train.step import AuxiliaryWeights, make_train_step

VOCAB = 11
NONE = AuxiliaryWeights(load_balance=0.0, z=0.0)


def random_batch(seed=0, batch=4, length=8, holes=False):
    rng = np.random.default_rng(seed)
    out = {"tokens": rng.integers(0, VOCAB, (batch, length + 1)).astype(np.int32)}
    if holes:  # rows of very different numbers of valid tokens, one row without any
        lengths = rng.permutation([0, 1, length // 2, length])[:batch]
        out["valid"] = np.arange(length) < lengths[:, None]
    return out


@functools.cache
def make_model_once(text):
    return make_model(config_from_json(text), VOCAB)


@functools.cache
def model_and_params(text):
    """The model of a config given as JSON, and its initial parameters on the host."""
    config = config_from_json(text)
    model = make_model_once(text)
    params = jax.jit(lambda: make_initial_state(config, model).params)()
    return model, jax.tree.map(np.asarray, params)


@functools.cache
def gradient_step(model, weights, accumulate_steps=1):
    """A step of gradient descent with rate 1: the update is minus the gradient."""
    return make_train_step(
        model, optax.sgd(1.0), lambda count: 0.5 * count, weights, accumulate_steps=accumulate_steps
    )


def plain_state(params):
    """A state that the step may donate."""
    variables = {"params": jax.tree.map(jnp.array, params)}
    return initial_state(variables, optax.sgd(1.0), jax.random.key(5))


def gradient(config, batch, weights, accumulate_steps=1, like=None):
    """The gradient and the Metrics of one step; the parameters are those of the config ``like``."""
    _, params = model_and_params(config_to_json(like or config))
    model = make_model_once(config_to_json(config))
    step = gradient_step(model, weights, accumulate_steps)
    after, metrics = step(plain_state(params), batch)
    return jax.tree.map(lambda a, b: a - np.asarray(b), params, after.params), metrics


def router_kernels(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf for path, leaf in leaves if "router" in jax.tree_util.keystr(path)]


def assert_trees_close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=0), a, b)


@pytest.mark.sweep
@pytest.mark.parametrize("holes", [False, True])
def test_loss_is_the_mean_over_tokens_plus_the_mean_over_layers(tiny, holes):
    config = tiny()
    weights = AuxiliaryWeights(load_balance=0.3, z=0.2)
    batch = random_batch(holes=holes)
    _, metrics = gradient(config, batch, weights)

    # The same, one token and one layer at a time.
    model, params = model_and_params(config_to_json(config))
    valid = batch.get("valid")
    logits, info = jax.jit(model.apply)({"params": params}, batch["tokens"][:, :-1], valid=valid)
    nll = []
    for row in range(4):
        for t in range(8):
            if valid is None or valid[row, t]:
                probs = (
                    np.exp(np.float64(logits[row, t])) / np.exp(np.float64(logits[row, t])).sum()
                )
                nll.append(-np.log(probs[batch["tokens"][row, t + 1]]))
    flat = None if valid is None else valid.reshape(-1)
    layers = [jax.tree.map(lambda x: x[layer], info) for layer in range(2)]  # noqa: B023
    balance = np.mean([load_balance_loss(layer.routing, valid=flat) for layer in layers])
    z = np.mean([z_loss(layer.routing.logits, valid=flat) for layer in layers])

    np.testing.assert_allclose(metrics.cross_entropy, np.mean(nll), rtol=1e-5)
    np.testing.assert_allclose(metrics.load_balance, balance, rtol=1e-5)
    np.testing.assert_allclose(metrics.z, z, rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, np.mean(nll) + 0.3 * balance + 0.2 * z, rtol=1e-5)
    assert metrics.num_tokens == len(nll)
    assert metrics.routing.load.sum() == 2 * 2 * len(nll)  # layers * k * tokens


@pytest.mark.parametrize("holes", [False, True])
def test_accumulation_is_the_full_batch(tiny, holes):
    batch = random_batch(holes=holes)
    whole, metrics = gradient(tiny(), batch, NONE)
    split, other = gradient(tiny(), batch, NONE, accumulate_steps=4)
    assert_trees_close(whole, split, atol=1e-6)
    np.testing.assert_allclose(metrics.cross_entropy, other.cross_entropy, rtol=1e-6)
    np.testing.assert_allclose(metrics.gradient_norm, other.gradient_norm, rtol=1e-5)
    np.testing.assert_array_equal(metrics.routing.load, other.routing.load)
    for a, b in zip(metrics.routing, other.routing, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_accumulation_of_a_dense_model(tiny):
    config = tiny(**{"moe.num_experts": 0})
    batch = random_batch(holes=True)
    whole, metrics = gradient(config, batch, NONE)
    split, other = gradient(config, batch, NONE, accumulate_steps=2)
    assert_trees_close(whole, split, atol=1e-6)
    assert metrics.routing is None and other.load_balance is None


def test_accumulated_auxiliary_losses_count_by_tokens(tiny):
    config = tiny()
    batch = random_batch(holes=True)
    _, together = gradient(config, batch, NONE, accumulate_steps=4)
    # Each row as a batch of its own, filled up with rows that do not count.
    rows = [{**batch, "valid": batch["valid"] & (np.arange(4) == i)[:, None]} for i in range(4)]
    alone = [gradient(config, row, NONE)[1] for row in rows]
    tokens = np.array([row["valid"].sum() for row in rows])
    for name in ("load_balance", "z"):
        values = np.array([float(getattr(metrics, name)) for metrics in alone])
        expected = np.sum(values * tokens) / tokens.sum()
        np.testing.assert_allclose(getattr(together, name), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["load_balance", "z"])
def test_auxiliary_gradient_reaches_the_router(tiny, name):
    batch = random_batch()
    without, _ = gradient(tiny(), batch, NONE)
    with_loss, _ = gradient(tiny(), batch, NONE._replace(**{name: 1.0}))
    kernels = list(zip(router_kernels(without), router_kernels(with_loss), strict=True))
    assert len(kernels) == 2
    for a, b in kernels:
        assert np.abs(a - b).max() > 1e-4
    # What comes after the last router has no part in its losses.
    a, b = (tree["final_norm"]["scale"] for tree in (without, with_loss))
    np.testing.assert_allclose(a, b, atol=1e-7)


def test_padding_changes_nothing(tiny):
    batch = random_batch(holes=True)
    other = {"tokens": batch["tokens"].copy(), "valid": batch["valid"]}
    past_the_end = np.concatenate([np.zeros((4, 1), bool), ~batch["valid"]], axis=1)
    first_inputs = np.concatenate([batch["valid"], np.zeros((4, 1), bool)], axis=1)
    other["tokens"][past_the_end & ~first_inputs] = 3
    assert (other["tokens"] != batch["tokens"]).any()
    weights = AuxiliaryWeights(load_balance=0.3, z=0.2)
    a, first = gradient(tiny(), batch, weights)
    b, second = gradient(tiny(), other, weights)
    assert_trees_close(a, b, atol=1e-7)
    assert first.loss == second.loss


def test_remat_and_repetition_count_losses_once(tiny):
    weights = AuxiliaryWeights(load_balance=0.3, z=0.2)
    batch = random_batch()
    plain, first = gradient(tiny(), batch, weights)
    remat, second = gradient(tiny(**{"model.remat": True}), batch, weights, like=tiny())
    assert_trees_close(plain, remat, atol=1e-6)
    np.testing.assert_allclose(first.loss, second.loss, rtol=1e-6)

    losses = {float(gradient(tiny(), batch, weights)[1].loss) for _ in range(20)}
    assert losses == {float(first.loss)}


def test_one_program_and_a_donated_state(tiny):
    model, params = model_and_params(config_to_json(tiny()))
    step = make_train_step(model, optax.sgd(1.0), lambda count: 0.5 * count, NONE)
    state = plain_state(params)
    given = jax.tree.leaves(state.params)[0]
    for seed in range(3):
        state, metrics = step(state, random_batch(seed))
        assert state.step == seed + 1
        assert metrics.learning_rate == 0.5 * seed
    assert step._cache_size() == 1
    assert given.is_deleted()


def test_dropout_follows_from_seed_and_step_alone(tiny):
    config = tiny(**{"model.dropout": 0.5, "moe.num_experts": 0})
    model, params = model_and_params(config_to_json(config))
    step = gradient_step(model, NONE)
    batch = random_batch()

    def loss(count, seed=5):
        state = plain_state(params)
        state = state._replace(
            step=jnp.asarray(count, jnp.int32), key=jax.random.key_data(jax.random.key(seed))
        )
        return float(step(state, batch)[1].loss)

    assert loss(3) == loss(3)
    assert len({loss(3), loss(4), loss(3, seed=6)}) == 3


def test_a_loss_without_weight_may_overflow(tiny):
    config = tiny()
    model, params = model_and_params(config_to_json(config))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 1e25 if "router" in jax.tree_util.keystr(path) else x, params
    )
    _, metrics = gradient_step(model, NONE)(plain_state(params), random_batch())
    assert np.isinf(metrics.z) and np.isfinite(metrics.loss)
    assert np.isfinite(metrics.gradient_norm)


def test_losses_of_a_batch_without_valid_tokens_are_zero(tiny):
    batch = random_batch()
    batch["valid"] = np.zeros((4, 8), bool)
    update, metrics = gradient(tiny(), batch, AuxiliaryWeights(0.3, 0.2))
    assert metrics.loss == 0 and all(not np.any(leaf) for leaf in jax.tree.leaves(update))


def router_state_of(config, params):
    """The initial router state for given parameters."""
    model = make_model_once(config_to_json(config))
    return jax.jit(lambda: make_initial_state(config, model).router_state)()


def stepped(config, batch, accumulate_steps=1, steps=10, weights=NONE):
    """State and Metrics after one step of a config, with its own router."""
    model, params = model_and_params(config_to_json(config))
    variables = {
        "params": jax.tree.map(jnp.array, params),
        "router_state": router_state_of(config, params),
    }
    step = make_train_step(
        model,
        optax.sgd(1.0),
        lambda count: 0.5 * count,
        weights,
        accumulate_steps=accumulate_steps,
        method=make_method(config),
        steps=steps,
    )
    return step(initial_state(variables, optax.sgd(1.0), jax.random.key(5)), batch)


def test_the_bias_moves_once_per_step_by_the_whole_batch(tiny):
    config = tiny(**{"router": "sigmoid_top_k", "routers.sigmoid_top_k.bias_rate": 0.001})
    batch = random_batch(holes=True)
    whole, metrics = stepped(config, batch)
    load = np.asarray(metrics.routing.load, np.float32)
    expected = 0.001 * np.sign(load.mean(axis=1, keepdims=True) - load)
    expected -= expected.mean(axis=1, keepdims=True)
    bias = stack_routers(whole.router_state)["state"]["bias"]
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, expected, atol=1e-9)
    split, _ = stepped(config, batch, accumulate_steps=4)
    np.testing.assert_array_equal(stack_routers(split.router_state)["state"]["bias"], bias)
    np.testing.assert_allclose(
        metrics.report["bias_span"], np.mean(np.ptp(expected, axis=1)), rtol=1e-5
    )


@pytest.mark.sweep
@pytest.mark.parametrize("noise", ["input_jitter", "expert_dropout"])
def test_remat_repeats_the_noise_of_the_forward_pass(tiny, noise):
    router = {"input_jitter": "noisy_top_k", "expert_dropout": "softmax_top_k"}[noise]
    changes = {"router": router, f"moe.{noise}": 0.2}
    batch = random_batch()
    plain, first = stepped(tiny(**changes), batch)
    again, second = stepped(tiny(**changes), batch)
    remat, third = stepped(tiny(**changes, **{"model.remat": True}), batch)
    assert first.loss == second.loss
    jax.tree.map(np.testing.assert_array_equal, plain.params, again.params)
    np.testing.assert_array_equal(first.routing.load, third.routing.load)
    np.testing.assert_allclose(first.loss, third.loss, rtol=1e-6)
    assert_trees_close(plain.params, remat.params, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("accumulate_steps", [2, 4])
def test_balance_of_sequences_does_not_depend_on_the_microbatch(tiny, accumulate_steps):
    weights = AuxiliaryWeights(load_balance=1.0, z=0.0, balance_per_sequence=True)
    batch = random_batch(holes=True)
    whole, metrics = gradient(tiny(), batch, weights)
    split, other = gradient(tiny(), batch, weights, accumulate_steps=accumulate_steps)
    np.testing.assert_allclose(metrics.load_balance, other.load_balance, rtol=1e-5)
    assert_trees_close(whole, split, atol=1e-6)
    # The balance of the batch is another loss.
    assert metrics.load_balance != gradient(tiny(), batch, NONE)[1].load_balance


def test_a_methods_own_losses_are_minimised(tiny):
    config = tiny(**{"router": "smooth_top_k", "routers.smooth_top_k.initial_eta": 0.0})
    state, metrics = stepped(config, random_batch())
    _, params = model_and_params(config_to_json(config))
    before, after = (stack_routers(tree)["eta"] for tree in (params, state.params))
    assert set(metrics.router_losses) == {"boundary"}
    np.testing.assert_allclose(
        metrics.loss, metrics.cross_entropy + metrics.router_losses["boundary"], rtol=1e-6
    )
    # More than the 2.5 that are asked for are active with such a margin: it shrinks.
    assert (metrics.routing.active_experts > 2.5).all() and (after < before).all()
    assert metrics.report["active_target"] == 2.5


@pytest.mark.parametrize("steps, target", [(1, 2.0), (2, 2.5)])
def test_methods_learn_how_far_training_is(tiny, steps, target):
    # After step 1 of 1 the margin is annealed away, after step 1 of 2 it is not yet.
    config = tiny(**{"router": "smooth_top_k", "routers.smooth_top_k.anneal": True})
    state, _ = stepped(config, random_batch(), steps=steps)
    np.testing.assert_array_equal(stack_routers(state.router_state)["state"]["target"], target)


def test_soft_methods_have_no_load_balance(tiny):
    config = tiny(router="smear", **{"moe.allow_future_leak": True})
    _, metrics = stepped(config, random_batch(holes=True))
    assert metrics.load_balance is None and np.isfinite(metrics.loss)
    assert metrics.routing.load.shape == (2, 4)


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(tiny):
    # A router with a state, an optimizer with moments.
    config = tiny(router="sigmoid_top_k")
    model = make_model(config, VOCAB)
    optimizer, schedule, method = optax.adam(0.1), lambda count: 0.5 * count, make_method(config)
    initial = jax.jit(lambda: make_initial_state(config, model).variables)()

    def start(skip_nonfinite):
        variables = jax.tree.map(jnp.array, initial)
        return initial_state(variables, optimizer, jax.random.key(5), skip_nonfinite=skip_nonfinite)

    step = make_train_step(model, optimizer, schedule, NONE, method=method, steps=10)
    good, bad = random_batch(), random_batch()
    bad["tokens"][1, 3] = 60000  # no row of the embedding: NaN

    state, metrics = step(start(True), good)
    plain, _ = step(start(False), good)
    assert metrics.skipped == (0, 0) and plain.skipped is None
    jax.tree.map(np.testing.assert_array_equal, state._replace(skipped=None), plain)
    before = jax.tree.map(np.asarray, state)
    for times in (1, 2):
        state, metrics = step(state, bad)
        assert np.isnan(metrics.loss) and metrics.skipped == (times, times)
        assert metrics.learning_rate == 0.5  # of the second update, which is still to come
        assert state.step == 1 + times
        after = state._replace(step=before.step, skipped=before.skipped)
        jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = step(state, good)
    assert np.isfinite(metrics.loss) and metrics.skipped == (2, 0) and metrics.learning_rate == 0.5
    assert optax.tree.get(state.opt_state, "count") == 2 and state.step == 4
