"""Expert choice against a loop, its bounds, and what makes it unfit for causal models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import RouterInputs, dense_gates, expert_choice, make_router, softmax_top_k

pytestmark = pytest.mark.usefixtures("quick_compilation")

gates_of = jax.jit(dense_gates)
choose = jax.jit(expert_choice, static_argnames="capacity")


def slow_choice(logits, capacity):
    """token i[E, C] and gate f64[E, C], expert by expert."""
    logits = np.asarray(logits, np.float64)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    order = [
        sorted(range(len(logits)), key=lambda t, e=e: (-probs[t, e], t))[:capacity]
        for e in range(logits.shape[1])
    ]
    return np.array(order), np.array([probs[tokens, e] for e, tokens in enumerate(order)])


@pytest.mark.parametrize(("num_tokens", "num_experts", "capacity"), [(24, 4, 6), (5, 3, 5)])
def test_matches_the_loop(num_tokens, num_experts, capacity):
    logits = 2 * jax.random.normal(jax.random.key(0), (num_tokens, num_experts))
    choice = choose(logits, capacity=capacity)
    token, gate = slow_choice(logits, capacity)
    np.testing.assert_array_equal(choice.token, token)
    np.testing.assert_allclose(choice.gate, gate, atol=1e-6)


def test_equal_probabilities_go_to_the_first_tokens():
    np.testing.assert_array_equal(choose(jnp.zeros((4, 2)), capacity=2).token, [[0, 1], [0, 1]])


def test_probabilities_that_underflow_do_not_tie():
    # For expert 1 they are e^-300, e^-200, e^-400: 0 in float32, yet tokens 1 and 0 are the best.
    logits = jnp.array([[0.0, -300.0], [0.0, -200.0], [0.0, -400.0]])
    np.testing.assert_array_equal(choose(logits, capacity=2).token[1], [1, 0])


def test_by_all_experts_or_by_none():
    # Each expert takes the token that is its own and, of two with .5 for it, the first.
    probs = jnp.array([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    gates = gates_of(choose(jnp.log(probs), capacity=2))
    np.testing.assert_allclose(gates, [[0.5, 0.5], [0.9, 0], [0, 0.9], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("capacity", [0, 4, 1.5])
def test_capacity_out_of_range(capacity):
    with pytest.raises(ValueError, match=rf"capacity: got {capacity}; allowed: 1\.\.3"):
        expert_choice(jnp.zeros((3, 2)), capacity)


def test_slots_without_a_token_are_empty():
    # Three valid tokens for four slots, one of them masked for expert 1.
    logits = jnp.zeros((5, 2)).at[1, 1].set(-jnp.inf)
    choice = choose(logits, capacity=4, valid=jnp.array([True, True, False, True, False]))
    np.testing.assert_array_equal(choice.token, [[1, 0, 3, 5], [0, 3, 5, 5]])
    np.testing.assert_allclose(choice.gate, [[1, 0.5, 0.5, 0], [0.5, 0.5, 0, 0]], rtol=1e-6)


def test_gradients_against_finite_differences():
    # Scores .5 apart: the differences reach no tie.
    order = jax.random.permutation(jax.random.key(1), jnp.arange(6.0))
    logits = jnp.stack([order, -order, jnp.zeros(6)], axis=1) * 0.5
    weight = jax.random.normal(jax.random.key(2), (3, 2))

    @jax.jit
    def f(z):
        return jnp.sum(expert_choice(z, 2).gate * weight)

    check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


def test_the_last_token_changes_what_earlier_ones_get():
    # Each expert takes 4 of 8 tokens. When the last token comes to want expert 0, an earlier one
    # loses its place; a token that chooses for itself keeps its experts.
    logits = jax.random.normal(jax.random.key(3), (8, 2)).at[7].set(jnp.array([-9.0, 9.0]))
    changed = logits.at[7].set(jnp.array([9.0, -9.0]))
    before, after = (gates_of(choose(z, capacity=4))[:7] for z in (logits, changed))
    assert (np.asarray(before) != np.asarray(after)).any()
    route = jax.jit(functools.partial(softmax_top_k, k=1))
    before, after = (gates_of(route(z))[:7] for z in (logits, changed))
    np.testing.assert_array_equal(before, after)


class TestRouter:
    ROUTER = make_router("expert_choice", k=2)

    def test_says_that_it_sees_the_future(self):
        assert self.ROUTER.sees_future == "always"

    @pytest.mark.parametrize(("given", "expected"), [(None, 4), (3, 3)])
    def test_capacity(self, given, expected):
        # ceil(2 * 10 / 6) = 4.
        inputs = RouterInputs(jax.random.normal(jax.random.key(4), (10, 6)))
        route = jax.jit(self.ROUTER.route, static_argnames="capacity")
        routed = route(inputs, {"kernel": jnp.eye(6)}, {}, capacity=given)
        token, _ = slow_choice(inputs.x, expected)
        np.testing.assert_array_equal(routed.choice.token, token)
