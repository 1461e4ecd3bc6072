"""The dense feed-forward network against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.layers import Mlp


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def formula(params, x, activation):
    p = params["params"]
    hidden = x @ p["in"]["kernel"] + p["in"].get("bias", 0)
    hidden = activation(x @ p["gate"]["kernel"]) * hidden if "gate" in p else activation(hidden)
    return hidden @ p["out"]["kernel"] + p["out"].get("bias", 0)


@pytest.mark.parametrize(
    "glu, use_bias, activation",
    [(False, False, "gelu"), (False, True, jnp.tanh), (True, False, "silu"), (True, True, "relu")],
)
def test_equals_the_formula(random_params, glu, use_bias, activation):
    layer = Mlp(7, activation=activation, glu=glu, use_bias=use_bias)
    x = normal(2, 3, 5)
    params = random_params(layer.init, x)
    y, info = layer.apply(params, x)
    assert info is None
    function = activation if callable(activation) else getattr(jax.nn, activation)
    np.testing.assert_allclose(y, formula(params, x, function), atol=1e-5)


def test_golden_value():
    # d=1, f=2, relu: x=2 -> hidden relu(2*(1,-1) + (0.5,0)) = (2.5, 0) -> 2.5*3 + 0*4 + 1 = 8.5
    params = {
        "in": {"kernel": jnp.array([[1.0, -1.0]]), "bias": jnp.array([0.5, 0.0])},
        "out": {"kernel": jnp.array([[3.0], [4.0]]), "bias": jnp.array([1.0])},
    }
    y, _ = Mlp(2, activation="relu", use_bias=True).apply({"params": params}, jnp.array([[2.0]]))
    assert y.tolist() == [[8.5]]


def test_parameters(random_params):
    layer = Mlp(7, glu=True, use_bias=True)
    params = random_params(layer.init, jnp.zeros((1, 5)))["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "in": {"kernel": (5, 7), "bias": (7,)},
        "gate": {"kernel": (5, 7)},
        "out": {"kernel": (7, 5), "bias": (5,)},
    }


def test_gradients(random_params):
    layer = Mlp(4, activation="silu", glu=True, use_bias=True)
    x = normal(3, 5)
    params = random_params(layer.init, x)
    check_grads(lambda p, x: layer.apply(p, x)[0], (params, x), order=1, modes=["rev"], rtol=0.02)


def test_invalid_positions_are_exactly_zero_and_change_no_gradient(random_params):
    layer = Mlp(7, use_bias=True)
    x = normal(2, 3, 5)
    valid = jnp.array([[True, False, True], [False, False, True]])
    params = random_params(layer.init, x)
    y, _ = layer.apply(params, x, valid=valid)
    np.testing.assert_array_equal(y[~valid], jnp.zeros((3, 5)))
    np.testing.assert_array_equal(y[valid], layer.apply(params, x)[0][valid])
    gradient = jax.grad(lambda x: layer.apply(params, x, valid=valid)[0].sum())(x)
    np.testing.assert_array_equal(gradient[~valid], jnp.zeros((3, 5)))


def test_bfloat16_compute_keeps_float32_parameters(random_params):
    layer = Mlp(7, dtype=jnp.bfloat16)
    x = normal(3, 5)
    params = random_params(layer.init, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    y, _ = layer.apply(params, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), formula(params, x, jax.nn.gelu), atol=0.05)


def test_dropout_is_on_the_output_and_only_in_training(random_params):
    layer = Mlp(7, dropout=0.5)
    x = normal(8, 5)
    params = random_params(layer.init, x)
    y, _ = layer.apply(params, x)
    dropped, _ = layer.apply(params, x, deterministic=False, rngs={"dropout": jax.random.key(2)})
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-6)
    assert 0.2 < np.mean(dropped == 0) < 0.8


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'swoosh'"):
        Mlp(7, activation="swoosh").init(jax.random.key(0), jnp.zeros((1, 5)))
