"""The router module: parameters, state, randomness, and float32 whatever comes in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.dispatch import positions
from moe_jax.layers import Router
from moe_jax.routing import make_router

top_2 = make_router("softmax_top_k", k=2)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def route(params, x, num_experts=4, method=top_2, **arguments):
    routed, _, _ = Router(method, num_experts).apply(params, x, **arguments)
    return routed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_logits_and_parameter_are_float32(random_params, dtype):
    x = normal(6, 5).astype(dtype)
    params = random_params(Router(top_2, 4).init, x)
    assert jax.tree.map(jnp.shape, params) == {"params": {"kernel": (5, 4)}}
    kernel = params["params"]["kernel"]
    logits = route(params, x).logits
    assert logits.dtype == kernel.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def test_selection_of_a_bfloat16_input_equals_that_of_float32():
    num_experts, top_8 = 64, make_router("softmax_top_k", k=8)
    x = normal(1024, 128).astype(jnp.bfloat16)
    params = {"params": {"kernel": normal(128, num_experts, seed=1) / 35}}

    def selected(x):
        choice = route(params, x, num_experts, top_8).choice
        return np.sort(choice.expert, axis=-1)

    np.testing.assert_array_equal(selected(x), selected(x.astype(jnp.float32)))
    # With a bfloat16 product instead, some tokens would get other experts.
    rounded = x @ params["params"]["kernel"].astype(jnp.bfloat16)
    assert np.any(np.sort(top_8(rounded).expert, axis=-1) != selected(x))


def test_the_gradient_of_a_bfloat16_input_reaches_the_kernel_in_float32(random_params):
    x = normal(3, 5).astype(jnp.bfloat16)
    weight = normal(3, 4, seed=2)
    params = random_params(Router(top_2, 4).init, x)
    d_params, d_x = jax.grad(lambda p, x: jnp.sum(weight * route(p, x).logits), (0, 1))(params, x)
    np.testing.assert_allclose(
        d_params["params"]["kernel"], x.astype(jnp.float32).T @ weight, atol=1e-5
    )
    assert d_x.dtype == jnp.bfloat16


def test_initial_spread():
    # Variance 0.1 / d: standard deviation sqrt(0.1 / 256) = 0.01976.
    params = Router(top_2, 64).init(jax.random.key(0), jnp.zeros((2, 256)))["params"]
    np.testing.assert_allclose(jnp.std(params["kernel"]), 0.01976, rtol=0.03)


def test_state_is_a_variable_that_routing_reads_and_never_writes():
    method = make_router("sigmoid_top_k", k=2)
    x = normal(6, 5)
    variables = Router(method, 4).init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["router_state"]) == {"state": {"bias": (4,)}}
    # A bias that puts expert 3 into every token's choice.
    pushed = {"state": {"bias": jnp.array([0.0, 0.0, 0.0, 2.0])}}
    chosen = route(variables | {"router_state": pushed}, x, method=method).choice.expert
    assert (chosen == 3).any(axis=-1).all()
    assert not (route(variables, x, method=method).choice.expert == 3).any(axis=-1).all()


def test_every_layer_has_a_hash_of_its_own():
    method = make_router("hash", k=1)
    ids, x = jnp.arange(200), jnp.zeros((200, 5))

    def experts(seed):
        layer = Router(method, 8)
        variables = layer.init(jax.random.key(seed), x, token_ids=ids)
        assert "params" not in variables
        return layer.apply(variables, x, token_ids=ids)[0].choice.expert

    np.testing.assert_array_equal(experts(0), experts(0))
    assert 0.05 < np.mean(experts(0) == experts(1)) < 0.25  # 1/8 by chance


def test_randomness_is_of_training_alone(random_params):
    x = normal(64, 5)
    layer = Router(top_2, 4, input_jitter=0.5, expert_dropout=0.5)
    params = random_params(layer.init, x)
    calm = layer.apply(params, x)[0]
    np.testing.assert_array_equal(calm.logits, layer.apply(params, x)[0].logits)

    def training(seed):
        rngs = {"router": jax.random.key(seed)}
        return layer.apply(params, x, deterministic=False, rngs=rngs)[0]

    np.testing.assert_array_equal(training(0).choice.gate, training(0).choice.gate)
    assert (training(0).logits != calm.logits).any()
    # Half of four experts out at a time, two of them there in any case.
    left_out = [np.isneginf(training(seed).logits) for seed in range(20)]
    assert all((out == out[0]).all() for out in left_out)  # the same for all tokens
    assert {int(out[0].sum()) for out in left_out} <= {0, 1, 2}
    assert 0 < np.mean(left_out) < 0.5


def test_a_stored_choice_is_repeated_with_gates_of_its_own(random_params):
    x = normal(6, 5)
    params = random_params(Router(top_2, 4).init, x)
    routed = route(params, x)
    worst = jax.lax.top_k(-routed.logits, 2)[1]
    repeated = route(params | {"replay": {"chosen": worst}}, x)
    np.testing.assert_array_equal(repeated.choice.expert, worst)
    probs = jax.nn.softmax(routed.logits)
    expected = jnp.take_along_axis(probs, worst, axis=1)
    np.testing.assert_allclose(repeated.choice.gate, expected, rtol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("name", ["softmax_top_k", "cosine_top_k"])
def test_fused_routing_is_the_same_with_positions(random_params, name, renormalize):
    method, x, valid = (
        make_router(name, k=2, renormalize=renormalize),
        normal(9, 5),
        jnp.arange(9) < 7,
    )
    params = random_params(Router(method, 4).init, x)

    def use(params, x, fused):
        routed, position, _ = Router(method, 4, fused=fused).apply(params, x, valid=valid)
        weight = normal(9, 2, seed=3)
        return jnp.sum(weight * routed.choice.gate) + jnp.sum(routed.choice.probs**2), (
            routed,
            position,
        )

    got, want = (
        jax.value_and_grad(use, (0, 1), has_aux=True)(params, x, fused) for fused in (True, False)
    )
    (_, (routed, position)), (_, (expected, nothing)) = got[0], want[0]
    assert nothing is None
    np.testing.assert_array_equal(
        position, positions(expected.choice.expert, 4, priority="arrival")
    )
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, (routed, got[1]), (expected, want[1]))


def test_other_methods_and_a_stored_choice_are_not_fused(random_params):
    x, sigmoid = normal(6, 5), make_router("sigmoid_top_k", k=2)
    variables = Router(sigmoid, 4).init(jax.random.key(0), x)
    assert Router(sigmoid, 4, fused=True).apply(variables, x)[1] is None
    params = random_params(Router(top_2, 4).init, x)
    stored = params | {"replay": {"chosen": jnp.tile(jnp.array([[3, 1]]), (6, 1))}}
    routed, position, _ = Router(top_2, 4, fused=True).apply(stored, x)
    assert position is None and (routed.choice.expert == jnp.array([3, 1])).all()
