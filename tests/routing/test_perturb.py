"""Noise of training: formulas, a simulated load, ranges and rates, and none of it in evaluation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import (
    RouterInputs,
    expert_dropout,
    input_jitter,
    make_router,
    noisy_logits,
    smooth_load,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

chances = jax.jit(smooth_load, static_argnames="k")

LOGITS = np.asarray(jax.random.normal(jax.random.key(0), (3, 5)))
NOISE_LOGITS = np.asarray(jax.random.normal(jax.random.key(1), (3, 5)))


def softplus(z):
    return np.log1p(np.exp(np.asarray(z, np.float64)))


def thresholds(noisy, k):
    """f64[T, E]: the k-th best of the other experts."""
    noisy = np.asarray(noisy, np.float64)
    return np.array([[np.sort(np.delete(row, e))[-k] for e in range(len(row))] for row in noisy])


def slow_load(logits, noisy, noise_logits, k):
    """f64[T, E], by the normal distribution."""
    z = (np.asarray(logits, np.float64) - thresholds(noisy, k)) / softplus(noise_logits)
    return np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(z)


class TestNoisyLogits:
    def test_formula(self):
        key = jax.random.key(2)
        draw = np.asarray(jax.random.normal(key, (3, 5)), np.float64)
        expected = LOGITS + softplus(NOISE_LOGITS) * draw
        np.testing.assert_allclose(
            noisy_logits(LOGITS, NOISE_LOGITS, key), expected, rtol=1e-5, atol=1e-6
        )

    def test_minus_infinity_stays(self):
        noisy = noisy_logits(jnp.array([[0.0, -jnp.inf]]), jnp.zeros((1, 2)), jax.random.key(3))
        assert noisy[0, 1] == -np.inf and np.isfinite(noisy[0, 0])


class TestSmoothLoad:
    NOISY = np.asarray(noisy_logits(LOGITS, NOISE_LOGITS, jax.random.key(4)))

    @pytest.mark.parametrize("k", [1, 2, 4])
    def test_matches_the_normal_distribution(self, k):
        chance = chances(LOGITS, self.NOISY, NOISE_LOGITS, k)
        np.testing.assert_allclose(
            chance, slow_load(LOGITS, self.NOISY, NOISE_LOGITS, k), atol=1e-5
        )

    def test_matches_a_simulation(self):
        # 100,000 draws: a share has a standard deviation of at most .0016.
        draw = np.random.default_rng(0).standard_normal((100_000, 3, 5))
        redrawn = LOGITS + softplus(NOISE_LOGITS) * draw
        share = np.mean(redrawn > thresholds(self.NOISY, 2), axis=0)
        chance = chances(LOGITS, self.NOISY, NOISE_LOGITS, 2)
        np.testing.assert_allclose(chance, share, atol=0.007)

    def test_all_experts_are_certain(self):
        np.testing.assert_array_equal(chances(LOGITS, self.NOISY, NOISE_LOGITS, 5), 1)

    @pytest.mark.parametrize("k", [2, 4, 5])
    def test_masked_experts(self, k):
        # With one expert masked the others have it as their rival only when there is no one else:
        # for k = 4 their place is certain.
        noisy = jnp.asarray(self.NOISY).at[:, 2].set(-jnp.inf)
        logits = jnp.asarray(LOGITS).at[:, 2].set(-jnp.inf)

        def total(logits, noise_logits):
            chance = smooth_load(logits, noisy, noise_logits, k)
            return jnp.sum(chance), chance

        gradient = jax.jit(jax.grad(total, (0, 1), has_aux=True))
        gradients, chance = gradient(logits, jnp.asarray(NOISE_LOGITS))
        expected = np.ones((3, 4))
        if k == 2:
            others = [np.delete(a, 2, axis=1) for a in (LOGITS, noisy, NOISE_LOGITS)]
            expected = slow_load(*others, k)
        np.testing.assert_array_equal(chance[:, 2], 0)
        np.testing.assert_allclose(np.delete(chance, 2, axis=1), expected, atol=1e-5)
        assert all(np.isfinite(gradient).all() for gradient in gradients)

    def test_gradients_against_finite_differences(self):
        # With the noisy logits held, the threshold does not move.
        f = jax.jit(lambda z, n: jnp.sum(smooth_load(z, self.NOISY, n, 2) ** 2))
        check_grads(f, (LOGITS, NOISE_LOGITS), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)

    def test_noise_that_vanishes_has_no_nan(self):
        # softplus(-60) = 8.8e-27: margin / noise^2 overflows, where the density of it is 0.
        @jax.jit
        @jax.value_and_grad
        def total(noise_logits):
            return jnp.sum(smooth_load(LOGITS, LOGITS, noise_logits, 2))

        for noise_logit in (-60.0, -200.0):
            value, gradient = total(jnp.full((3, 5), noise_logit))
            # The two best of each token are certain.
            np.testing.assert_allclose(value, 6.0, rtol=1e-5)
            assert np.isfinite(gradient).all()


class TestInputJitter:
    def test_range_and_mean(self):
        # 20,000 uniform numbers of [.9, 1.1]: their mean has a standard deviation of .0004.
        factor = np.asarray(input_jitter(jnp.ones((200, 100)), jax.random.key(5), 0.1))
        assert factor.min() >= 0.9 - 1e-6 and factor.max() <= 1.1 + 1e-6
        assert factor.min() < 0.901 and factor.max() > 1.099
        np.testing.assert_allclose(factor.mean(), 1.0, atol=0.002)

    def test_keeps_the_dtype_and_nothing_at_zero(self):
        x = jnp.ones((3, 2), jnp.bfloat16)
        assert input_jitter(x, jax.random.key(6), 0.1).dtype == jnp.bfloat16
        assert input_jitter(x, jax.random.key(6), 0.0) is x

    @pytest.mark.parametrize("amount", [-0.1, 1.0])
    def test_amount_out_of_range(self, amount):
        with pytest.raises(ValueError, match=f"amount: got {amount}; allowed: 0 <= number < 1"):
            input_jitter(jnp.ones((3, 2)), jax.random.key(7), amount)


class TestExpertDropout:
    def masks(self, rate, at_least, number=4000):
        keys = jax.random.split(jax.random.key(8), number)
        mask = jax.jit(jax.vmap(lambda key: expert_dropout(key, 8, rate, at_least=at_least)))
        return np.asarray(mask(keys))

    def test_keeps_as_many_as_needed(self):
        kept = self.masks(0.9, 3).sum(axis=1)
        assert kept.min() == 3 and kept.max() > 3

    def test_rate(self):
        # All 8 are out, and one put back, once in .3^8 = 7e-5. Of 32,000 draws the share that
        # stays has a standard deviation of .0026, of 4,000 (each expert) .0072.
        masks = self.masks(0.3, 1)
        np.testing.assert_allclose(masks.mean(), 0.7, atol=0.01)
        np.testing.assert_allclose(masks.mean(axis=0), 0.7, atol=0.03)

    def test_no_rate_leaves_all(self):
        assert self.masks(0.0, 1, number=10).all()

    @pytest.mark.parametrize(
        ("rate", "at_least", "message"),
        [(1.0, 1, "rate: got 1.0"), (0.5, 0, "at_least: got 0"), (0.5, 9, "at_least: got 9")],
    )
    def test_bad_arguments(self, rate, at_least, message):
        with pytest.raises(ValueError, match=message):
            expert_dropout(jax.random.key(9), 8, rate, at_least=at_least)


class TestNoisyTopK:
    ROUTER = make_router("noisy_top_k", k=2, importance_weight=0.1, load_weight=0.3)
    X = np.asarray(jax.random.normal(jax.random.key(10), (7, 4)))
    WEIGHTS = {
        "kernel": np.asarray(jax.random.normal(jax.random.key(11), (4, 5))),
        "noise_kernel": np.asarray(jax.random.normal(jax.random.key(12), (4, 5))),
    }

    def route(self, key, weights=None):
        inputs = RouterInputs(jnp.asarray(self.X), key=key)
        return jax.jit(self.ROUTER.route)(inputs, weights or self.WEIGHTS, {})

    def test_no_noise_in_evaluation(self):
        routed = self.route(None)
        np.testing.assert_allclose(routed.logits, self.X @ self.WEIGHTS["kernel"], atol=1e-5)
        assert routed.losses == {}
        jax.tree.map(np.testing.assert_array_equal, routed, self.route(None))

    def test_noise_in_training_follows_the_key(self):
        key = jax.random.key(13)
        draw = jax.random.normal(key, (7, 5))
        clean = self.X @ self.WEIGHTS["kernel"]
        expected = clean + softplus(self.X @ self.WEIGHTS["noise_kernel"]) * draw
        one, again, other = (self.route(k) for k in (key, key, jax.random.key(14)))
        np.testing.assert_allclose(one.logits, expected, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, one, again)
        assert (np.asarray(one.logits) != np.asarray(other.logits)).any()

    def test_losses(self):
        # Weight times variance over squared mean of the gates, and of the chances, of each expert.
        routed = self.route(jax.random.key(15))
        gates = np.zeros((7, 5))
        for t in range(7):
            gates[t, routed.choice.expert[t]] = routed.choice.gate[t]
        clean = self.X @ self.WEIGHTS["kernel"]
        noise = self.X @ self.WEIGHTS["noise_kernel"]
        chance = slow_load(clean, routed.logits, noise, 2)
        for name, weight, value in (("importance", 0.1, gates), ("load", 0.3, chance)):
            load = value.sum(axis=0)
            expected = weight * load.var() / load.mean() ** 2
            np.testing.assert_allclose(routed.losses[name], expected, rtol=1e-4)

    def test_the_load_loss_reaches_both_kernels(self):
        gradient = jax.grad(lambda w: self.route(jax.random.key(16), w).losses["load"])(
            self.WEIGHTS
        )
        assert all(np.isfinite(g).all() and np.any(g) for g in gradient.values())

    def test_first_noise(self):
        # softplus(0) = ln 2.
        weight = self.ROUTER.weights(4, 5)["noise_kernel"]
        first = weight.init(jax.random.key(17), weight.shape, jnp.float32)
        np.testing.assert_array_equal(first, 0)
