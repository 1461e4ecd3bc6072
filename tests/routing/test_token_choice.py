"""Routers of token choice against a loop, golden numbers and closed-form gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import ROUTERS, make_router, softmax_top_k, top_k_softmax

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Compiled as a whole, which is quicker than step by step.
ROUTES = {
    "top_k_softmax": jax.jit(top_k_softmax, static_argnames="k"),
    "softmax_top_k": jax.jit(softmax_top_k, static_argnames="k"),
    "softmax_top_k renormalised": jax.jit(
        functools.partial(softmax_top_k, renormalize=True), static_argnames="k"
    ),
}


def slow_route(logits, k, normalise_over_chosen):
    """Token by token: sort by (-logit, index), take k, weigh."""
    logits = np.asarray(logits, np.float64)
    num_tokens, num_experts = logits.shape
    expert = np.full((num_tokens, k), num_experts)
    gate = np.zeros((num_tokens, k))
    for t in range(num_tokens):
        order = sorted(range(num_experts), key=lambda e: (-logits[t, e], e))[:k]
        order = [e for e in order if logits[t, e] != -np.inf]
        alive = [e for e in range(num_experts) if logits[t, e] != -np.inf]
        pool = order if normalise_over_chosen else alive
        top = max((logits[t, e] for e in pool), default=0.0)
        total = sum(np.exp(logits[t, e] - top) for e in pool)
        for slot, e in enumerate(order):
            expert[t, slot], gate[t, slot] = e, np.exp(logits[t, e] - top) / total
    return expert, gate


def is_normalised(name):
    return name != "softmax_top_k"


@pytest.mark.parametrize("name", ROUTES)
class TestBoth:
    """The softmax before the choice, after it, and after it by renormalising."""

    @pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (7, 5, 5), (33, 8, 2), (17, 64, 8)])
    def test_matches_the_loop(self, name, shape):
        num_tokens, num_experts, k = shape
        logits = 3 * jax.random.normal(jax.random.key(0), (num_tokens, num_experts))
        routing = ROUTES[name](logits, k)
        expert, gate = slow_route(logits, k, is_normalised(name))
        np.testing.assert_array_equal(routing.expert, expert)
        np.testing.assert_allclose(routing.gate, gate, atol=1e-6)
        np.testing.assert_allclose(routing.probs, jax.nn.softmax(logits), atol=1e-6)

    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_gradient_against_finite_differences(self, name, k):
        # Logits 0.3 apart: the differences of +-1e-3 do not reach a tie.
        logits = jax.random.permutation(
            jax.random.key(5), 0.3 * jnp.arange(5.0), independent=True
        ) + jnp.zeros((4, 5))
        weight = jax.random.normal(jax.random.key(6), (4, k))

        def f(z):
            routing = ROUTES[name](z, k)
            return jnp.sum(routing.gate * weight) + jnp.sum(jnp.sin(3 * routing.probs))

        f = jax.jit(f)
        check_grads(f, (logits,), order=1, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2, eps=1e-2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (dict(logits=jnp.zeros((3, 4)), k=5), r"k: got 5; allowed: 1\.\.4"),
            (dict(logits=jnp.zeros((3, 4)), k=0), r"k: got 0; allowed: 1\.\.4"),
            (dict(logits=jnp.zeros((3, 4)), k=1.5), r"k: got 1\.5"),
            (dict(logits=jnp.zeros(4), k=1), r"logits: got shape \(4,\); allowed: \[T, E\]"),
            (dict(logits=jnp.zeros((3, 4)), k=1, valid=jnp.ones(4)), r"valid: got shape \(4,\)"),
        ],
    )
    def test_bad_input(self, name, arguments, message):
        with pytest.raises(ValueError, match=message):
            ROUTES[name](**arguments)


def test_golden_normalised_or_not():
    # softmax(2,1,0,0): e^2 = 7.389056, e = 2.718282, 1, 1; sum 12.107338.
    # 7.389056/12.107338 = .610295, 2.718282/12.107338 = .224515; over the two chosen,
    # 1/(1+e^-1) = .731059 and .268941.
    logits = jnp.array([[2.0, 1.0, 0.0, 0.0]])
    np.testing.assert_allclose(softmax_top_k(logits, 2).gate, [[0.610296, 0.224515]], atol=1e-6)
    for routing in (top_k_softmax(logits, 2), softmax_top_k(logits, 2, renormalize=True)):
        np.testing.assert_allclose(routing.gate, [[0.731059, 0.268941]], atol=1e-6)
    assert softmax_top_k(logits, 1).gate.shape == (1, 1)


def test_golden_router_gradient_at_k_1():
    # Scalar experts with outputs (2,-1,3), logits (1,.5,0), k = 1: y = 2 p_0, so
    # dy/dz = 2 p_0 (1-p_0, -p_1, -p_2) with p = (.506480, .307196, .186324).
    logits, outputs = jnp.array([[1.0, 0.5, 0.0]]), jnp.array([2.0, -1.0, 3.0])

    def y(z, renormalize):
        routing = softmax_top_k(z, 1, renormalize=renormalize)
        return jnp.sum(routing.gate * outputs[routing.expert])

    np.testing.assert_allclose(
        jax.grad(y)(logits, False), [[0.499916, -0.311177, -0.188739]], atol=2e-6
    )
    with pytest.warns(UserWarning, match="no gradient"):
        np.testing.assert_array_equal(jax.grad(y)(logits, True), 0)


def test_closed_forms_of_the_router_gradient():
    # With a_i = G.f_i for expert outputs f_i and upstream gradient G. Renormalised:
    # dL/dz_j = g_j (a_j - sum_i g_i a_i) for chosen j, else 0. Not renormalised:
    # dL/dz_j = p_j (1[j chosen] a_j - sum over chosen i of p_i a_i) for all j.
    logits = jax.random.normal(jax.random.key(0), (6, 5))
    a = jax.random.normal(jax.random.key(1), (6, 5))

    def loss(z, route):
        routing = route(z, 3)
        return jnp.sum(routing.gate * jnp.take_along_axis(a, routing.expert, axis=1))

    probs = jax.nn.softmax(logits)
    chosen = jnp.zeros_like(logits).at[jnp.arange(6)[:, None], top_k_softmax(logits, 3).expert]
    chosen = chosen.set(1.0)
    gate = chosen * probs / jnp.sum(chosen * probs, axis=1, keepdims=True)
    renormalised = gate * (a - jnp.sum(gate * a, axis=1, keepdims=True))
    plain = probs * (chosen * a - jnp.sum(chosen * probs * a, axis=1, keepdims=True))
    np.testing.assert_allclose(jax.grad(loss)(logits, top_k_softmax), renormalised, atol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(logits, softmax_top_k), plain, atol=1e-6)


def test_bf16_inputs_choose_as_float32_does():
    logits = jax.random.normal(jax.random.key(0), (4096, 64)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        softmax_top_k(logits, 8).expert, softmax_top_k(logits.astype(jnp.float32), 8).expert
    )


def test_selection_survives_probabilities_that_underflow():
    # p = (1, 0, 0, 0) in float32 beyond a gap of 104, yet expert 2 is the second choice.
    logits = jnp.array([[0.0, -300.0, -200.0, -400.0]])
    np.testing.assert_array_equal(softmax_top_k(logits, 2).expert, [[0, 2]])


def test_nan_logits_stay_visible():
    routing = top_k_softmax(jnp.array([[0.0, jnp.nan, 1.0]]), 2)
    assert np.isnan(routing.gate).any()


def test_registry_names_the_allowed():
    assert set(ROUTERS) >= {"top_k_softmax", "softmax_top_k"}
    routing = make_router("softmax_top_k", k=2, renormalize=True)(jnp.eye(3), valid=None)
    np.testing.assert_allclose(jnp.sum(routing.gate, axis=1), 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="router: got 'topk'; allowed: .*softmax_top_k, .*top_k_"):
        make_router("topk", k=2)
    with pytest.raises(ValueError, match="got 'tau'; allowed: renormalize"):
        make_router("softmax_top_k", k=2, tau=1.0)


@pytest.mark.parametrize("route", ["softmax_top_k", "top_k_softmax"])
def test_both_zeros_are_equal(route):
    """-0.0 and 0.0 tie, though a total order of floats has one before the other."""
    routing = make_router(route, k=2)(jnp.array([[-0.0, 0.0, -0.0, 0.0]]))
    assert routing.expert.tolist() == [[0, 1]]


def test_a_stored_choice_that_does_not_fit():
    logits = jnp.zeros((3, 4))
    for chosen in (jnp.zeros((2, 2), jnp.int32), jnp.zeros(3, jnp.int32), jnp.zeros((3, 2))):
        with pytest.raises(ValueError, match=r"chosen: got .*; allowed: int\[3, slots\]"):
            softmax_top_k(logits, 2, chosen=chosen)
    routing = softmax_top_k(logits, 2, chosen=[[0, -1], [4, 9], [1, 2]])
    assert routing.expert.tolist() == [[0, 4], [4, 4], [1, 2]]
    assert routing.gate.tolist() == [[0.25, 0], [0, 0], [0.25, 0.25]]


@pytest.mark.parametrize("name", ["softmax_top_k", "top_k_softmax"])
def test_no_tokens_at_all(name):
    routing = make_router(name, k=2)(jnp.zeros((0, 4)))
    assert routing.expert.shape == routing.gate.shape == (0, 2)
