"""Shapes, names and the initial spread of the expert weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import Experts


@pytest.fixture(scope="module")
def initial():
    experts = Experts(8, 128, glu=True, use_bias=True)
    return jax.tree.map(np.asarray, experts.init(jax.random.key(0), 64)["params"])


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_names_and_shapes(glu, use_bias):
    expected = {"w_in": (8, 64, 128), "w_out": (8, 128, 64)}
    if glu:
        expected["w_gate"] = (8, 64, 128)
    if use_bias:
        expected |= {"b_in": (8, 128), "b_out": (8, 64)}
    returned, params = jax.eval_shape(
        lambda key: Experts(8, 128, glu=glu, use_bias=use_bias).init_with_output(key, 64),
        jax.random.key(0),
    )
    assert jax.tree.map(jnp.shape, params["params"]) == expected
    assert jax.tree.map(jnp.shape, returned) == expected


def test_initial_spread_is_that_of_one_expert_alone(initial):
    # 1/sqrt(fan-in) of one expert: w_in and w_gate 1/sqrt(64) = 0.125, w_out 1/sqrt(128) = 0.0884.
    # With the 8 experts in the fan-in w_in would have 1/sqrt(8 * 64) = 0.0442.
    np.testing.assert_allclose(np.std(initial["w_in"], axis=(1, 2)), 0.125, rtol=0.04)
    np.testing.assert_allclose(np.std(initial["w_gate"], axis=(1, 2)), 0.125, rtol=0.04)
    np.testing.assert_allclose(np.std(initial["w_out"], axis=(1, 2)), 0.0884, rtol=0.04)
    np.testing.assert_allclose(np.mean(initial["w_in"], axis=(1, 2)), 0.0, atol=0.006)
    assert not initial["b_in"].any() and not initial["b_out"].any()


def test_experts_start_out_different(initial):
    for name in ("w_in", "w_gate", "w_out"):
        assert len({expert.tobytes() for expert in initial[name]}) == 8


def test_compute_dtype_is_cast_and_parameters_are_not(random_params):
    experts = Experts(2, 8, use_bias=True, dtype=jnp.bfloat16)
    params = random_params(lambda key: experts.init(key, 4))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for name, value in experts.apply(params, 4).items():
        np.testing.assert_array_equal(value, params["params"][name].astype(jnp.bfloat16))
