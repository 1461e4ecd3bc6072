"""Auxiliary losses: golden numbers with their arithmetic, gradients, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from moe_jax.routing import (
    TokenChoice,
    adapt_l1_weight,
    balance_bias,
    boundary_loss,
    importance_loss,
    load_balance_loss,
    load_loss,
    relu_l1_loss,
    softmax_top_k,
    top_k_softmax,
    z_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Compiled as a whole, which is quicker than step by step.
route = jax.jit(softmax_top_k, static_argnames=("k", "renormalize"))
balance_loss = jax.jit(load_balance_loss, static_argnames=("per", "choices", "num_sequences"))
importance = jax.jit(importance_loss)
boundary = jax.jit(boundary_loss, static_argnames="k")
logits_loss = jax.jit(z_loss)


def routing_of(probs, k, valid=None):
    return route(jnp.log(jnp.asarray(probs)), k, valid=valid)


def test_padding_is_not_counted():
    # Row i has p = .7 on expert i: P = (.25,)*4, f = (1/4,)*4, so 4 * 4 * (1/16) = 1.
    rows = np.full((4, 4), 0.1) + 0.6 * np.eye(4)
    pads = np.tile([0.97, 0.01, 0.01, 0.01], (4, 1))
    valid = np.array([True] * 4 + [False] * 4)
    probs = np.concatenate([rows, pads])
    counted = balance_loss(routing_of(probs, 1))
    np.testing.assert_allclose(counted, 1.72, atol=1e-5)
    np.testing.assert_allclose(balance_loss(routing_of(probs, 1, valid)), 1.0, atol=1e-5)
    masked_later = balance_loss(routing_of(probs, 1), valid=valid)
    np.testing.assert_allclose(masked_later, 1.0, atol=1e-5)


def test_layers_are_averaged_not_joined():
    # Layer 0 sends all to expert 0, layer 1 all to expert 1: each has loss E = 2.
    one_hot = np.stack([np.tile([1.0, 0.0], (4, 1)), np.tile([0.0, 1.0], (4, 1))])
    layers = jax.vmap(lambda p: routing_of(p, 1))(jnp.asarray(one_hot))
    np.testing.assert_allclose(jnp.mean(jax.vmap(balance_loss)(layers)), 2.0, rtol=1e-6)


def test_both_conventions_of_f():
    # k = 2 takes experts 0 and 1: f = (1/2, 1/2, 0, 0), 4 (.5*.5 + .5*.3) = 1.6; per token, f = 1
    # for both and 3.2.
    routing = routing_of(np.tile([0.5, 0.3, 0.15, 0.05], (6, 1)), 2)
    np.testing.assert_allclose(balance_loss(routing), 1.6, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(routing, per="token"), 3.2, rtol=1e-6)
    with pytest.raises(ValueError, match="per: got 'batch'; allowed"):
        balance_loss(routing, per="batch")


@pytest.mark.parametrize("k", [1, 2, 8])
def test_perfect_balance_is_one(k):
    logits = jnp.stack([jnp.roll(jnp.arange(8.0), i) for i in range(8)])
    np.testing.assert_allclose(balance_loss(route(logits, k, renormalize=True)), 1.0, rtol=1e-6)


def test_gradient_flows_through_the_probabilities_only():
    # d/dz of E sum f_i P_i with f fixed: E/T p_j (f_j - sum_i f_i p_i).
    logits = jax.random.normal(jax.random.key(0), (12, 4))
    routing = route(logits, 2)
    fraction = np.bincount(np.ravel(routing.expert), minlength=4) / 24
    inner = np.sum(fraction * routing.probs, axis=1, keepdims=True)
    expected = 4 / 12 * routing.probs * (fraction - inner)
    gradient = jax.jit(jax.grad(lambda z: balance_loss(route(z, 2))))(logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_two_shards_give_the_global_loss_and_gradient():
    # p = (.9,.1) on one half, (.1,.9) on the other: f = P = (1/2,1/2): 1. Each half alone has
    # 2 * .9 = 1.8, which is what a mean of local losses would give.
    logits = jnp.log(jnp.repeat(jnp.array([[0.9, 0.1], [0.1, 0.9]]), 4, axis=0))

    def loss(z):
        return balance_loss(route(z, 1))

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data")))
    value, gradient = jax.jit(jax.value_and_grad(loss))(sharded)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_allclose(jnp.mean(jnp.stack([loss(logits[:4]), loss(logits[4:])])), 1.8)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(loss))(logits), atol=1e-7)


@pytest.mark.parametrize("num_experts", [1, 4])
def test_no_nan_at_balance_one_expert_or_zero_router(num_experts):
    logits = jnp.zeros((8, num_experts))
    gradient = jax.jit(jax.grad(lambda z: balance_loss(route(z, 1)) + logits_loss(z)))(logits)
    assert np.isfinite(gradient).all()


def test_no_valid_token_is_zero_with_zero_gradient():
    valid = jnp.zeros(5, bool)

    def loss(z):
        return balance_loss(route(z, 2, valid=valid), valid=valid) + logits_loss(z, valid=valid)

    value, gradient = jax.jit(jax.value_and_grad(loss))(
        jax.random.normal(jax.random.key(0), (5, 4))
    )
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_wrong_shapes_are_refused():
    routing = routing_of(np.full((3, 4), 0.25), 1)
    one = jnp.array([True])
    for loss in (
        lambda: balance_loss(routing, valid=one),
        lambda: logits_loss(jnp.ones((3, 4)), valid=one),
    ):
        with pytest.raises(ValueError, match=r"valid: got shape \(1,\); allowed: \(3,\)"):
            loss()
    with pytest.raises(ValueError, match=r"logits: got shape \(4,\); allowed: \[T, E\]"):
        logits_loss(jnp.ones(4))


def test_z_loss_golden():
    # logsumexp(0,0) = log 2, logsumexp(log 3, 0) = log 4; mean of squares (.480453 + 1.921812)/2.
    logits = jnp.array([[0.0, 0.0], [np.log(3.0), 0.0], [50.0, 50.0]])
    valid = jnp.array([True, True, False])
    np.testing.assert_allclose(logits_loss(logits, valid=valid), 1.2011325, rtol=1e-6)


def test_z_loss_gradients_and_infinite_rows():
    logits = jax.random.normal(jax.random.key(1), (5, 4))
    check_grads(logits_loss, (logits,), order=2, atol=2e-2, rtol=2e-2)
    logits = logits.at[0].set(-jnp.inf).at[1, 2].set(-jnp.inf)
    value, gradient = jax.value_and_grad(z_loss)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_large_counts_are_exact():
    # A running count in bfloat16 sticks at 256.
    probs = jnp.tile(jnp.array([[0.75, 0.25]]), (40_840, 1))
    routing = TokenChoice(jnp.zeros((40_840, 1), jnp.int32), probs[:, :1], jnp.log(probs), probs)
    np.testing.assert_allclose(balance_loss(routing), 2 * 0.75, rtol=1e-5)


def test_first_choices_alone():
    # Tokens (.5,.3,.15,.05) and (.1,.2,.3,.4): P = (.3,.25,.225,.225). First choices are 0 and 3,
    # f = (.5,0,0,.5), 4 (.15 + .1125) = 1.05; both choices are 0 1 3 2, f = .25 and 1.
    routing = routing_of([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], 2)
    for per in ("assignment", "token"):
        loss = balance_loss(routing, choices="first", per=per)
        np.testing.assert_allclose(loss, 1.05, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(routing), 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="choices: got 'last'; allowed: 'all', 'first'"):
        balance_loss(routing, choices="last")


class TestScopeOfASequence:
    # Four sequences of eight tokens, and a mask with a sequence that has one token only.
    LOGITS = 2 * jax.random.normal(jax.random.key(0), (32, 4))
    HOLES = jax.random.bernoulli(jax.random.key(1), 0.6, (32,)).at[8:16].set(False).at[9].set(True)

    @pytest.mark.parametrize("holes", [False, True])
    def test_is_the_mean_over_sequences(self, holes):
        valid = np.asarray(self.HOLES) if holes else np.ones(32, bool)
        losses, tokens = [], []
        for rows in np.split(np.arange(32), 4):
            rows = rows[valid[rows]]
            probs = np.asarray(jax.nn.softmax(self.LOGITS[rows]), np.float64)
            chosen = np.argsort(-probs, axis=1, kind="stable")[:, :2]
            fraction = np.bincount(chosen.ravel(), minlength=4) / (2 * len(rows))
            losses.append(4 * fraction @ probs.mean(axis=0))
            tokens.append(len(rows))
        loss = balance_loss(route(self.LOGITS, 2, valid=valid), num_sequences=4)
        np.testing.assert_allclose(loss, np.average(losses, weights=tokens), rtol=1e-5)

    @pytest.mark.parametrize("holes", [False, True])
    def test_gradient_is_the_same_in_every_microbatch(self, holes):
        # As 4x1, 2x2 and 1x4 sequences, each microbatch counting by its valid tokens.
        valid = self.HOLES if holes else jnp.ones(32, bool)

        @functools.partial(jax.jit, static_argnums=0)
        def accumulated(microbatches):
            @jax.grad
            def gradient(logits):
                total = 0.0
                for part in jnp.split(jnp.arange(32), microbatches):
                    routing = route(logits[part], 2, valid=valid[part])
                    loss = balance_loss(routing, valid=valid[part], num_sequences=4 // microbatches)
                    total += loss * jnp.sum(valid[part]) / jnp.sum(valid)
                return total

            return gradient(self.LOGITS)

        one = accumulated(1)
        assert np.any(one)
        for microbatches in (2, 4):
            np.testing.assert_allclose(accumulated(microbatches), one, atol=1e-7)

    def test_differs_from_the_scope_of_the_batch(self):
        # Sequence 0 goes to expert 0, sequence 1 to expert 1: E = 2 each, together 1.
        routing = routing_of(np.repeat(np.eye(2), 4, axis=0), 1)
        np.testing.assert_allclose(balance_loss(routing, num_sequences=2), 2.0, rtol=1e-6)
        np.testing.assert_allclose(balance_loss(routing), 1.0, rtol=1e-6)

    def test_sequences_are_of_equal_length(self):
        routing = routing_of(np.full((6, 2), 0.5), 1)
        with pytest.raises(ValueError, match=r"num_sequences: got 4; allowed: divisors of 6"):
            balance_loss(routing, num_sequences=4)


class TestVariation:
    """Importance and load: variance over squared mean."""

    @staticmethod
    def routing(counts):
        """One token per assignment, with gate 1."""
        expert = jnp.repeat(jnp.arange(4), jnp.array(counts))[:, None]
        probs = jax.nn.one_hot(expert[:, 0], 4)
        return TokenChoice(expert, jnp.ones(expert.shape), jnp.log(probs), probs)

    def test_golden(self):
        # Load (6,2,0,0): mean 2, variance (16 + 0 + 4 + 4)/4 = 6, 6/4 = 1.5.
        routing = self.routing([6, 2, 0, 0])
        np.testing.assert_allclose(importance(routing), 1.5, rtol=1e-6)
        np.testing.assert_allclose(load_loss(routing.probs), 1.5, rtol=1e-6)

    def test_invalid_tokens_do_not_count(self):
        # Without two tokens of expert 0: (4,2,0,0), mean 1.5, variance 11/4, over 9/4.
        routing, valid = self.routing([6, 2, 0, 0]), jnp.arange(8) >= 2
        np.testing.assert_allclose(importance(routing, valid=valid), 11 / 9, rtol=1e-6)
        np.testing.assert_allclose(load_loss(routing.probs, valid=valid), 11 / 9, rtol=1e-6)

    @pytest.mark.parametrize(("num_experts", "k"), [(4, 4), (1, 1)])
    def test_no_gradient_and_no_nan_at_perfect_balance(self, num_experts, k):
        # A zero router that takes all experts has importance (2,2,2,2); with E = 1 it is (8,).
        def loss(z):
            routing = route(z, k)
            return importance(routing) + load_loss(routing.probs)

        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.zeros((8, num_experts)))
        assert value == 0
        np.testing.assert_allclose(gradient, 0, atol=1e-7)

    def test_zero_router_with_ties_has_a_finite_gradient(self):
        # All choose experts {0, 1}: gates (.25,.25,0,0), mean .125, variance 1/64, CV^2 = 1.
        loss = jax.jit(jax.value_and_grad(lambda z: importance(route(z, 2))))
        value, gradient = loss(jnp.zeros((8, 4)))
        np.testing.assert_allclose(value, 1.0, rtol=1e-6)
        assert np.isfinite(gradient).all()

    def test_nobody_has_anything(self):
        valid = jnp.zeros(5, bool)
        loss = jax.jit(jax.value_and_grad(lambda chance: load_loss(chance, valid=valid)))
        value, gradient = loss(jnp.full((5, 4), 0.5))
        assert value == 0
        np.testing.assert_array_equal(gradient, 0)

    def test_gradients_against_finite_differences(self):
        # Logits .3 apart: the differences reach no tie.
        logits = 0.3 * jax.random.permutation(
            jax.random.key(2), jnp.tile(jnp.arange(4.0), (5, 1)), axis=1, independent=True
        )
        f = jax.jit(lambda z: importance(top_k_softmax(z, 2)))
        check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)
        chance = jax.random.uniform(jax.random.key(3), (5, 4))
        check_grads(jax.jit(load_loss), (chance,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


class TestBoundaryLoss:
    # k = 2: z_[k] is 1 and -.5. With epsilon = 1 there are 4 above 0, and 2 above -1.5.
    LOGITS = np.array([[2.0, 1.0, 0.7, 0.2, -1.0], [0.0, -0.5, -2.0, -3.0, -4.0]], np.float32)

    def test_by_hand(self):
        # A = 3; 10 * 1 * (3 - 2.5) = 5, and by epsilon 10 * .5 = 5; the logits learn nothing.
        def loss(logits, epsilon):
            return boundary(logits, 2, epsilon, 2.5, weight=10.0)

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(self.LOGITS, 1.0)
        np.testing.assert_allclose(value, 5.0, rtol=1e-6)
        np.testing.assert_array_equal(gradients[0], 0)
        np.testing.assert_allclose(gradients[1], 5.0, rtol=1e-6)

    @pytest.mark.parametrize(
        ("epsilon", "expected"),
        # A = 2: 1.5 reaches to -.5 and -2, and neither expert 4 of the first token (-1) nor expert
        # 2 of the second (-2) is above; 1.6 has one more in the second; 10 has all.
        [(0.1, 0.1 * -0.5), (1.5, 1.5 * 0.5), (1.6, 1.6 * 1.0), (10.0, 10 * 2.5)],
    )
    def test_counts_what_the_margin_reaches(self, epsilon, expected):
        np.testing.assert_allclose(boundary(self.LOGITS, 2, epsilon, 2.5), expected, rtol=1e-5)

    def test_padding_and_masks(self):
        valid = jnp.array([True, False])
        np.testing.assert_allclose(boundary(self.LOGITS, 2, 1.0, 2.5, valid=valid), 1.5)
        assert boundary(self.LOGITS, 2, 1.0, 2.5, valid=jnp.zeros(2, bool)) == 0
        # An expert of -inf is never active, also where fewer than k are left.
        masked = jnp.array([[0.0, -jnp.inf, -jnp.inf], [0.0, 0.0, -jnp.inf]])
        np.testing.assert_allclose(boundary(masked, 2, 1.0, 2.0), -0.5, rtol=1e-6)

    def test_large_logits_do_not_round_the_margin_away(self):
        # 1e6 - 1e-4 is 1e6 in float32, and > would then leave out the k-th expert itself.
        logits = jnp.full((1, 3), 1e6)
        np.testing.assert_allclose(boundary(logits, 2, 1e-4, 2.0), 1e-4, rtol=1e-6)


class TestReluL1:
    GATES = np.array([[1, 0, 0.5, 0], [0, 2, 0, 0], [0.5, 0.5, 0, 0]], np.float32)

    def test_golden(self):
        # Sums (1.5, 2.5, .5, 0) by tokens with a gate (2, 2, 1, 0): 3 + 5 + .5 = 8.5;
        # E / (T^2 k) = 4/9, so 3.7777778. By a gate of expert e: 4/9 * tokens of e.
        value, gradient = jax.jit(jax.value_and_grad(lambda r: relu_l1_loss(r, 1, 1.0)))(self.GATES)
        np.testing.assert_allclose(value, 3.7777778, rtol=1e-6)
        expected = np.where(self.GATES > 0, 4 / 9 * np.array([2, 2, 1, 0]), gradient)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)

    def test_padding(self):
        gates = np.concatenate([self.GATES, np.full((1, 4), 9.0, np.float32)])
        valid = jnp.array([True, True, True, False])
        np.testing.assert_allclose(relu_l1_loss(gates, 2, 3.0, valid=valid), 5.6666667, rtol=1e-6)
        assert relu_l1_loss(gates, 1, 1.0, valid=jnp.zeros(4, bool)) == 0

    def test_many_tokens(self):
        # T^2 = 2.5e9 is above int32. All gates 1: E/(T^2 k) * E T T = E^2/k = 4.
        np.testing.assert_allclose(relu_l1_loss(jnp.ones((50_000, 2)), 1, 1.0), 4.0, rtol=1e-5)

    def test_weight_follows_the_sparsity(self):
        # Of 12 gates 5 are active: S = .5833333 < 1 - 1/4, so the weight grows.
        sparsity = np.mean(self.GATES == 0)
        np.testing.assert_allclose(sparsity, 0.5833333, rtol=1e-6)
        np.testing.assert_allclose(adapt_l1_weight(1.0, sparsity, 1, 4), 1.2, rtol=1e-6)
        # Above 1 - 2/4, and exactly at 1 - 1/4, it shrinks.
        np.testing.assert_allclose(adapt_l1_weight(1.0, sparsity, 2, 4), 1 / 1.2, rtol=1e-6)
        np.testing.assert_allclose(adapt_l1_weight(6.0, 0.75, 1, 4, factor=2.0), 3.0, rtol=1e-6)

    @pytest.mark.parametrize("sparsity", [0.0, 1.0])
    def test_weight_can_come_back_from_anywhere(self, sparsity):
        # 1e-8 times 1.2^+-1000 = 1e+-79 is no float32, and neither 0 nor infinity ever changes.
        def adapt(_, weight):
            return adapt_l1_weight(weight, sparsity, 1, 4)

        weight = jax.lax.fori_loop(0, 1000, adapt, jnp.float32(1e-8))
        assert 0 < weight < np.inf


class TestBalanceBias:
    def test_golden(self):
        # Mean 4: signs (-1,1,1,1) times .001, less their mean .0005.
        bias = balance_bias(jnp.zeros(4), jnp.array([10, 2, 2, 2]), 0.001)
        np.testing.assert_allclose(bias, [-0.0015, 0.0005, 0.0005, 0.0005], atol=1e-9)
        assert bias.dtype == jnp.float32

    def test_balance_and_a_rate_of_zero_leave_the_differences(self):
        bias = jnp.array([0.3, 0.1, 0.0, 0.0])
        for counts, rate in (([4, 4, 4, 4], 0.001), ([10, 2, 2, 2], 0.0)):
            np.testing.assert_allclose(
                balance_bias(bias, jnp.array(counts), rate), bias - 0.1, atol=1e-7
            )

    def test_does_not_drift(self):
        bias = jnp.zeros(3)
        for _ in range(50):
            bias = balance_bias(bias, jnp.array([5, 1, 0]), 0.01)
        np.testing.assert_allclose(jnp.mean(bias), 0, atol=1e-6)
