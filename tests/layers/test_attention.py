"""Causal attention against a softmax written out; padding; causality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import CausalSelfAttention, rotate

B, S, D, H = 2, 6, 8, 2
attend = jax.jit(CausalSelfAttention(H).apply)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def params(random_params):
    return random_params(CausalSelfAttention(H).init, jnp.zeros((B, S, D)))


@pytest.fixture(scope="module")
def x():
    return normal(B, S, D, seed=1)


def softmax_written_out(params, x, valid):
    """Reference: exp(scores) over the valid positions up to the query's own, over their sum."""
    kernel = {name: p["kernel"] for name, p in params["params"].items()}
    heads = {name: (x @ kernel[name]).reshape(B, S, H, D // H) for name in kernel}
    query, key = (rotate(heads[name], jnp.arange(S)) for name in ("query", "key"))
    sees = np.array(
        [[[s <= t and valid[b, s] for s in range(S)] for t in range(S)] for b in range(B)]
    )
    outs = []
    for h in range(H):
        scores = query[:, :, h] @ key[:, :, h].swapaxes(1, 2) / np.sqrt(D / H)
        weights = jnp.where(sees, jnp.exp(scores), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outs.append(weights / jnp.where(total == 0, 1, total) @ heads["value"][:, :, h])
    return jnp.where(valid[..., None], jnp.concatenate(outs, axis=-1) @ kernel["out"], 0)


VALID = {
    "none given": None,
    "left, right": [[False] * 2 + [True] * 4, [True] * 3 + [False] * 3],
    "hole, all padding": [[True, False, True, True, False, True], [False] * 6],
}


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID.keys())
def test_output_and_gradients_equal_the_reference(params, x, valid):
    valid = None if valid is None else np.array(valid)
    everything = np.ones((B, S), bool) if valid is None else valid
    weight = normal(B, S, D, seed=2)

    def layer(params, x):
        return attend(params, x, valid=valid)

    def reference(params, x):
        return softmax_written_out(params, x, everything)

    def outputs_and_gradients(f):
        y, pull_back = jax.vjp(f, params, x)
        return y, pull_back(weight)

    outputs_and_gradients = jax.jit(outputs_and_gradients, static_argnums=0)
    got, expected = outputs_and_gradients(layer), outputs_and_gradients(reference)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


def test_later_positions_change_nothing_bit_for_bit(params, x):
    y, changed = attend(params, x), attend(params, x.at[:, -1].add(1.0))
    np.testing.assert_array_equal(y[:, :-1], changed[:, :-1])
    assert np.abs(y[:, -1] - changed[:, -1]).min() > 0


@pytest.mark.parametrize("left, right", [(3, 0), (0, 3), (2, 4)])
def test_padding_leaves_valid_positions_alone(params, x, left, right):
    padded = np.pad(x, ((0, 0), (left, right), (0, 0)), constant_values=1e3)
    valid = np.pad(np.ones((B, S), bool), ((0, 0), (left, right)))
    y = attend(params, padded, valid=valid)
    expected = attend(params, x)
    np.testing.assert_allclose(y[:, left : left + S], expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(y)[~valid], 0)


def test_a_row_of_padding_gives_no_nan(params, x):
    valid = jnp.array([[False] * S, [True] * S])

    def loss(params, x):
        return jnp.sum(attend(params, x, valid=valid) ** 2)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradients)))
    np.testing.assert_array_equal(gradients[1][0], np.zeros((S, D)))


def test_parameters(params):
    shapes = jax.tree.map(jnp.shape, params["params"])
    assert shapes == {name: {"kernel": (D, D)} for name in ("query", "key", "value", "out")}


def test_bfloat16_compute_keeps_float32_parameters(random_params, params, x):
    layer = CausalSelfAttention(H, dtype=jnp.bfloat16)
    variables = random_params(layer.init, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    y = layer.apply(params, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), attend(params, x), atol=0.05)


def test_dropout_is_on_the_output_and_only_in_training(params, x):
    layer = CausalSelfAttention(H, dropout=0.5)
    y = layer.apply(params, x, deterministic=True)
    np.testing.assert_allclose(y, attend(params, x), atol=1e-5)
    rngs = {"dropout": jax.random.key(3)}
    dropped = layer.apply(params, x, deterministic=False, rngs=rngs)
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-6)
    assert 0.2 < np.mean(dropped == 0) < 0.8


@pytest.mark.parametrize("heads, width", [(3, 8), (0, 8), (2, 6), (16, 8)])
def test_heads_that_do_not_fit_are_refused(heads, width):
    message = f"num_heads: got {heads} for width {width}; allowed: a divisor .* even head size"
    with pytest.raises(ValueError, match=message):
        CausalSelfAttention(heads).init(jax.random.key(0), jnp.zeros((1, 4, width)))


def test_a_single_position(params):
    # One key: its weight is 1, whatever the scores.
    x = normal(1, 1, D, seed=4)
    kernels = params["params"]
    expected = x @ kernels["value"]["kernel"] @ kernels["out"]["kernel"]
    np.testing.assert_allclose(attend(params, x), expected, atol=1e-5)
