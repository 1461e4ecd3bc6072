"""ReLU gates: golden numbers, a loop, gradients, and the router with its adaptive L1 loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import Observed, RouterInputs, dense_gates, make_router, relu_gate

pytestmark = pytest.mark.usefixtures("quick_compilation")

choose = jax.jit(relu_gate, static_argnames="max_active")
gates_of = jax.jit(dense_gates)

# relu of it is [[1, 0, .5, 0], [0, 2, 0, 0], [.5, .5, 0, 0]].
LOGITS = np.array([[1, -1, 0.5, 0], [-1, 2, 0, -3], [0.5, 0.5, -2, -0.1]], np.float32)


def slow_gates(logits, max_active=None):
    gates = np.zeros(np.shape(logits))
    for t, row in enumerate(np.asarray(logits, np.float64)):
        for e in np.argsort(-row, kind="stable")[:max_active]:
            gates[t, e] = max(row[e], 0.0)
    return gates


def test_golden():
    # A logit of exactly 0 is not active.
    routing = choose(LOGITS)
    np.testing.assert_array_equal(routing.expert, [[0, 2, 4, 4], [1, 4, 4, 4], [0, 1, 4, 4]])
    np.testing.assert_array_equal(routing.gate, [[1, 0.5, 0, 0], [2, 0, 0, 0], [0.5, 0.5, 0, 0]])


@pytest.mark.parametrize("max_active", [None, 1, 3])
def test_matches_the_loop(max_active):
    logits = jax.random.normal(jax.random.key(0), (40, 8))
    routing = choose(logits, max_active=max_active)
    assert routing.gate.shape == (40, max_active or 8)
    np.testing.assert_allclose(gates_of(routing), slow_gates(logits, max_active), rtol=1e-6)


def test_max_active_keeps_the_highest():
    routing = choose(LOGITS, max_active=1)
    np.testing.assert_array_equal(routing.expert, [[0], [1], [0]])
    with pytest.raises(ValueError, match=r"max_active: got 5; allowed: 1\.\.4"):
        relu_gate(LOGITS, max_active=5)


def test_a_token_may_have_no_expert():
    routing = choose(-jnp.ones((1, 3)))
    np.testing.assert_array_equal(routing.expert, [[3, 3, 3]])
    np.testing.assert_array_equal(routing.gate, 0)


def test_gradients_against_finite_differences():
    # Halves away from the kink at 0.
    logits = 0.5 + jax.random.randint(jax.random.key(1), (5, 4), -3, 3).astype(jnp.float32)
    weight = jax.random.normal(jax.random.key(2), (5, 4))

    @jax.jit
    def f(z):
        return jnp.sum(dense_gates(relu_gate(z)) * weight)

    check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(logits), weight * (logits > 0), rtol=1e-6)


class TestRouter:
    ROUTER = make_router("relu_gate", k=1)
    WEIGHTS = {"kernel": np.eye(4, dtype=np.float32)}

    def weight_after(self, load, num_tokens, weight=1.0):
        load = jnp.asarray(load, jnp.int32)
        observed = Observed(load, jnp.int32(num_tokens), jnp.float32(0))
        state = {"l1_weight": jnp.full(load.shape[0], weight, jnp.float32)}
        return jax.jit(self.ROUTER.update)(state, {}, observed)["l1_weight"]

    def test_loss_by_hand(self):
        # Sums over tokens (1.5, 2.5, .5, 0), tokens with a gate (2, 2, 1, 0): 3 + 5 + .5 = 8.5,
        # and 2 * E / (T^2 k) * 8.5 = 2 * 4 / 9 * 8.5 = 7.5555556.
        routed = jax.jit(self.ROUTER.route)(
            RouterInputs(jnp.asarray(LOGITS)), self.WEIGHTS, {"l1_weight": jnp.float32(2.0)}
        )
        np.testing.assert_allclose(routed.losses["l1"], 7.5555556, rtol=1e-6)

    def test_loss_leaves_invalid_tokens_out(self):
        x = jnp.concatenate([jnp.asarray(LOGITS), jnp.full((1, 4), 9.0)])
        inputs = RouterInputs(x, valid=jnp.array([True, True, True, False]))
        routed = jax.jit(self.ROUTER.route)(inputs, self.WEIGHTS, {"l1_weight": jnp.float32(2.0)})
        np.testing.assert_allclose(routed.losses["l1"], 7.5555556, rtol=1e-6)

    def test_first_weight(self):
        state = self.ROUTER.state(None, self.WEIGHTS, 4)
        np.testing.assert_allclose(state["l1_weight"], 1e-8, rtol=1e-6)
        assert state["l1_weight"].dtype == jnp.float32

    def test_weight_grows_while_too_many_are_active(self):
        # 5 of 12 gates: S = .5833 < 1 - 1/4.
        weight = self.weight_after([[2, 2, 1, 0]], 3)
        np.testing.assert_allclose(weight, [1.2], rtol=1e-6)
        # 2 of 12: S = .8333 > .75.
        weight = self.weight_after([[1, 1, 0, 0]], 3)
        np.testing.assert_allclose(weight, [1 / 1.2], rtol=1e-6)

    def test_one_sparsity_for_all_layers(self):
        # 5 + 0 of 24 gates: S = .79 > .75, though the first layer by itself has .58.
        weight = self.weight_after([[2, 2, 1, 0], [0, 0, 0, 0]], 3)
        np.testing.assert_allclose(weight, [1 / 1.2] * 2, rtol=1e-6)

    def test_counts_that_overflow_int32(self):
        # 2^20 tokens, 4 layers, 1024 experts: 2^32 pairs, one in 1024 of them active.
        router = make_router("relu_gate", k=8)
        load = jnp.full((4, 1024), 2**10, jnp.int32)
        observed = Observed(load, jnp.int32(2**20), jnp.float32(0))
        state = jax.jit(router.update)({"l1_weight": jnp.ones(4)}, {}, observed)
        np.testing.assert_allclose(state["l1_weight"], [1 / 1.2] * 4, rtol=1e-6)
