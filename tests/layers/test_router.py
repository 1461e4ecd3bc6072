"""The router's linear map, in float32 whatever comes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import Router


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_logits_and_parameter_are_float32(random_params, dtype):
    x = normal(2, 3, 5).astype(dtype)
    params = random_params(Router(4).init, x)
    assert jax.tree.map(jnp.shape, params["params"]) == {"kernel": (5, 4)}
    kernel = params["params"]["kernel"]
    logits = Router(4).apply(params, x)
    assert logits.dtype == kernel.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_selection_of_a_bfloat16_input_equals_that_of_float32(random_params):
    num_experts, k = 64, 8
    x = normal(1024, 128).astype(jnp.bfloat16)
    params = {"params": {"kernel": normal(128, num_experts, seed=1) / 35}}

    def selected(logits):
        return np.sort(jax.lax.top_k(logits, k)[1], axis=-1)

    same_input = Router(num_experts).apply(params, x.astype(jnp.float32))
    logits = Router(num_experts).apply(params, x)
    np.testing.assert_array_equal(selected(logits), selected(same_input))
    # With a bfloat16 product instead, some tokens would get other experts.
    rounded = x @ params["params"]["kernel"].astype(jnp.bfloat16)
    assert np.any(selected(rounded.astype(jnp.float32)) != selected(same_input))


def test_the_gradient_of_a_bfloat16_input_reaches_the_kernel_in_float32(random_params):
    x = normal(3, 5).astype(jnp.bfloat16)
    weight = normal(3, 4, seed=2)
    params = random_params(Router(4).init, x)
    d_params, d_x = jax.grad(lambda p, x: jnp.sum(weight * Router(4).apply(p, x)), (0, 1))(
        params, x
    )
    np.testing.assert_allclose(
        d_params["params"]["kernel"], x.astype(jnp.float32).T @ weight, atol=1e-5
    )
    assert d_x.dtype == jnp.bfloat16


def test_initial_spread():
    # Variance 0.1 / d: standard deviation sqrt(0.1 / 256) = 0.01976.
    kernel = Router(64).init(jax.random.key(0), jnp.zeros((1, 256)))["params"]["kernel"]
    np.testing.assert_allclose(jnp.std(kernel), 0.01976, rtol=0.03)
