"""Sigmoid scores with a selecting bias and groups: golden numbers, a loop, the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import Observed, RouterInputs, dense_gates, make_router, sigmoid_top_k

pytestmark = pytest.mark.usefixtures("quick_compilation")

choose = jax.jit(
    sigmoid_top_k, static_argnames=("k", "num_groups", "top_groups", "renormalize", "scale")
)
gates_of = jax.jit(dense_gates)


def logits_of(scores):
    scores = np.asarray(scores, np.float64)
    return jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)


def slow_route(logits, k, bias=0.0, num_groups=1, top_groups=1, renormalize=True, scale=1.0):
    """f64[T, E], token by token."""
    logits = np.asarray(logits, np.float64)
    num_tokens, num_experts = logits.shape
    scores = 1 / (1 + np.exp(-logits))
    biased = scores + np.asarray(bias, np.float64)
    size = num_experts // num_groups
    gates = np.zeros_like(scores)
    for t in range(num_tokens):
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        groups.sort(key=lambda group: -sum(sorted(biased[t, list(group)])[-2:]))
        allowed = [e for group in groups[:top_groups] for e in group]
        chosen = sorted(allowed, key=lambda e: (-biased[t, e], e))[:k]
        total = sum(scores[t, chosen]) if renormalize else 1.0
        gates[t, chosen] = scale * scores[t, chosen] / total
    return gates


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1), (8, 5)])
def test_matches_the_loop(groups, renormalize):
    logits = 2 * jax.random.normal(jax.random.key(0), (40, 8))
    bias = 0.3 * jax.random.normal(jax.random.key(1), (8,))
    arguments = dict(num_groups=groups[0], top_groups=groups[1], renormalize=renormalize, scale=2.5)
    routing = choose(logits, 3, bias=bias, **arguments)
    expected = slow_route(logits, 3, bias, **arguments)
    np.testing.assert_allclose(gates_of(routing), expected, atol=1e-6)
    assert (np.diff(jnp.take_along_axis(logits, routing.expert, axis=1), axis=1) <= 0).all()


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_against_finite_differences(renormalize):
    # Logits .3 apart: the differences reach no tie.
    logits = 0.3 * jax.random.permutation(
        jax.random.key(2), jnp.tile(jnp.arange(6.0), (4, 1)), axis=1, independent=True
    )
    weight = jax.random.normal(jax.random.key(3), (4, 6))

    @jax.jit
    def f(z):
        return jnp.sum(dense_gates(sigmoid_top_k(z, 3, renormalize=renormalize)) * weight)

    check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


class TestBias:
    def test_selects_but_does_not_weigh(self):
        # Scores (.6,.5,.4) and bias (0,0,.3) select by (.6,.5,.7): experts 2 and 0, whose scores
        # sum to 1.
        routing = choose(logits_of([[0.6, 0.5, 0.4]]), 2, bias=jnp.array([0, 0, 0.3]))
        np.testing.assert_array_equal(routing.expert, [[0, 2]])
        np.testing.assert_allclose(routing.gate, [[0.6, 0.4]], rtol=1e-6)

    def test_a_small_score_survives_a_large_bias(self):
        # In float32, (1e-7 + 12) - 12 would be 0.
        bias = jnp.array([0.0, 0.0, 12.0])
        logits = logits_of([[0.6, 0.5, 1e-7]])
        plain = choose(logits, 2, bias=bias, renormalize=False)
        np.testing.assert_array_equal(plain.expert, [[0, 2]])
        np.testing.assert_allclose(plain.gate, [[0.6, 1e-7]], rtol=1e-5)
        # 1e-7 / (.6 + 1e-7) = 1.666666e-7.
        normalised = choose(logits, 2, bias=bias)
        np.testing.assert_allclose(normalised.gate[0, 1], 1e-7 / 0.6000001, rtol=1e-5)

    def test_gets_no_gradient(self):
        logits = jax.random.normal(jax.random.key(4), (5, 4))

        @jax.jit
        @jax.grad
        def gradient(bias):
            return jnp.sum(sigmoid_top_k(logits, 2, bias=bias).gate ** 2)

        np.testing.assert_array_equal(gradient(jnp.array([0.1, -0.2, 0.0, 0.3])), 0)


def test_tiny_scores_normalise_to_one():
    # sigmoid(-58) = 6.5e-26 each: with 1e-20 added to the sum the gates would sum to 2.6e-5.
    routing = choose(jnp.full((1, 4), -58.0), 4)
    np.testing.assert_allclose(routing.gate, [[0.25] * 4], rtol=1e-6)
    routing = choose(jnp.full((1, 4), -200.0), 4)
    np.testing.assert_allclose(routing.gate, [[0.25] * 4], rtol=1e-6)


class TestGroups:
    # Group 0 has .9 + .8 = 1.7, group 1 has .95 + .1 = 1.05, although the best expert is there.
    LOGITS = logits_of([[0.9, 0.8, 0.95, 0.1]])

    def test_two_best_of_a_group_count(self):
        routing = choose(self.LOGITS, 2, num_groups=2, top_groups=1)
        np.testing.assert_array_equal(routing.expert, [[0, 1]])
        everywhere = choose(self.LOGITS, 2)
        np.testing.assert_array_equal(everywhere.expert, [[2, 0]])

    def test_negative_biases_do_not_let_others_in(self):
        # All biased scores are negative, so a 0 outside the group would be the highest.
        bias = jnp.full(4, -2.0)
        routing = choose(self.LOGITS, 2, bias=bias, num_groups=2, top_groups=1)
        np.testing.assert_array_equal(routing.expert, [[0, 1]])
        np.testing.assert_allclose(routing.gate, [[0.9 / 1.7, 0.8 / 1.7]], rtol=1e-6)

    def test_bias_counts_in_the_choice_of_group(self):
        # 1.05 + 2 * .4 = 1.85 > 1.7.
        bias = jnp.array([0.0, 0.0, 0.4, 0.4])
        routing = choose(self.LOGITS, 2, bias=bias, num_groups=2, top_groups=1)
        np.testing.assert_array_equal(routing.expert, [[2, 3]])

    def test_a_group_with_a_masked_expert_counts_the_other(self):
        # Group 0 is left with .9 and so loses to 1.05; with all of group 1 masked it wins.
        route = dict(k=2, num_groups=2, top_groups=1)
        routing = choose(self.LOGITS.at[0, 1].set(-jnp.inf), **route)
        np.testing.assert_array_equal(routing.expert, [[2, 3]])
        routing = choose(self.LOGITS.at[0, 1:].set(-jnp.inf), **route)
        np.testing.assert_array_equal(routing.expert, [[0, 4]])


def test_scale_comes_after_the_normalisation():
    routing = choose(jax.random.normal(jax.random.key(5), (6, 5)), 3, scale=2.5)
    np.testing.assert_allclose(jnp.sum(routing.gate, axis=1), 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(k=2, num_groups=3), r"num_groups: got 3; allowed: divisors of 8"),
        (dict(k=2, num_groups=4, top_groups=5), r"top_groups: got 5; allowed: 1\.\.4"),
        (dict(k=5, num_groups=4, top_groups=2), r"k: got 5; allowed: 1\.\.4"),
        (dict(k=2, bias=jnp.zeros(7)), r"bias: got shape \(7,\); allowed: \(8,\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sigmoid_top_k(jnp.zeros((3, 8)), **arguments)


class TestRouter:
    ROUTER = make_router("sigmoid_top_k", k=2, bias_rate=0.001)

    def test_update_once_per_step(self):
        # Counts summed over the microbatches: mean 4, so -1 for 10 and +1 for 2 (times .001), less
        # their mean .0005. The second layer is balanced and stays.
        load = jnp.array([[10, 2, 2, 2], [4, 4, 4, 4]], jnp.int32)
        before = {"bias": jnp.zeros((2, 4))}
        observed = Observed(load, jnp.int32(8), jnp.float32(0.1))
        state = jax.jit(self.ROUTER.update)(before, {}, observed)
        expected = [[-0.0015, 0.0005, 0.0005, 0.0005], [0, 0, 0, 0]]
        np.testing.assert_allclose(state["bias"], expected, atol=1e-9)
        assert state["bias"].dtype == jnp.float32
        np.testing.assert_array_equal(before["bias"], 0)

    def test_bias_evens_out_a_lopsided_load(self):
        # Expert 0 is best for all 64 tokens and expert 1 second; its bias must fall below theirs.
        logits = jnp.array([1.0, 0.5, 0.0, 0.0]) + 0.1 * jax.random.normal(
            jax.random.key(6), (64, 4)
        )
        router = make_router("sigmoid_top_k", k=1, bias_rate=0.01)
        weights = {"kernel": jnp.eye(4)}

        @jax.jit
        def step(bias):
            choice = router.route(RouterInputs(logits), weights, {"bias": bias}).choice
            load = jnp.sum(choice.expert == jnp.arange(4), axis=0, dtype=jnp.int32)
            observed = Observed(load[None], jnp.int32(64), jnp.float32(0))
            return router.update({"bias": bias[None]}, weights, observed)["bias"][0], load

        bias, first = step(router.state(None, weights, 4)["bias"])
        for _ in range(60):
            bias, load = step(bias)
        assert first[0] == 64
        assert (np.asarray(load) >= 8).all()

    def test_evaluation_changes_nothing(self):
        weights = {"kernel": jnp.eye(4)}
        state = {"bias": jnp.array([0.1, 0.0, -0.1, 0.0])}
        inputs = RouterInputs(jax.random.normal(jax.random.key(7), (6, 4)))
        route = jax.jit(self.ROUTER.route)
        first, second = (route(inputs, weights, state) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)
        np.testing.assert_allclose(state["bias"], [0.1, 0.0, -0.1, 0.0], rtol=1e-6)
        np.testing.assert_allclose(self.ROUTER.report(weights, state)["bias_span"], 0.2, rtol=1e-6)


def test_no_tokens_at_all():
    bias = jnp.zeros(4)
    routing = sigmoid_top_k(jnp.zeros((0, 4)), 2, bias=bias, num_groups=2, top_groups=1)
    assert routing.expert.shape == (0, 2)


def test_without_a_rate_large_logits_keep_their_order():
    # sigmoid(25) and sigmoid(30) are both 1 in float32, so a bias of zeros would tie them.
    x = jnp.array([[20.0, 30.0, 25.0, 18.0]])
    router = make_router("sigmoid_top_k", k=2, bias_rate=0.0)
    weights = {"kernel": jnp.eye(4)}
    state = router.state(jax.random.key(0), weights, 4)
    assert router.route(RouterInputs(x), weights, state).choice.expert.tolist() == [[1, 2]]


def test_one_renormalised_expert_is_warned_of():
    with pytest.warns(UserWarning, match="sigmoid_top_k with k=1"):
        sigmoid_top_k(jnp.zeros((2, 4)), 1)
