"""Soft MoE and SMEAR against numpy: mixtures of tokens, of slots and of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import RouterInputs, linear_logits, make_router, merge_weights
from moe_jax.routing import soft_moe_weights as eager_soft_moe_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

soft_moe_weights = jax.jit(eager_soft_moe_weights)

X = np.asarray(jax.random.normal(jax.random.key(0), (6, 5)))
SLOTS = np.asarray(jax.random.normal(jax.random.key(1), (5, 3, 2)))
VALID = np.array([True, False, True, True, False, True])


def softmax(z, axis):
    weight = np.exp(z - z.max(axis=axis, keepdims=True))
    return weight / weight.sum(axis=axis, keepdims=True)


def slow_weights(x, slots):
    """dispatch and combine, f64[T, E, S] each."""
    width, num_experts, num_slots = slots.shape
    logits = np.asarray(x, np.float64) @ np.asarray(slots, np.float64).reshape(width, -1)
    shape = (len(x), num_experts, num_slots)
    return softmax(logits, 0).reshape(shape), softmax(logits, 1).reshape(shape)


class TestSoftMoEWeights:
    def test_matches_numpy(self):
        choice = soft_moe_weights(X, SLOTS)
        dispatch, combine = slow_weights(X, SLOTS)
        np.testing.assert_allclose(choice.dispatch, dispatch, atol=1e-6)
        np.testing.assert_allclose(choice.combine, combine, atol=1e-6)
        np.testing.assert_allclose(choice.probs, combine.sum(axis=2), atol=1e-6)

    def test_sums_to_one_over_tokens_and_over_slots(self):
        choice = soft_moe_weights(X, SLOTS)
        np.testing.assert_allclose(jnp.sum(choice.dispatch, axis=0), np.ones((3, 2)), rtol=1e-5)
        np.testing.assert_allclose(jnp.sum(choice.combine, axis=(1, 2)), np.ones(6), rtol=1e-5)

    def test_invalid_tokens_are_as_if_they_were_not_there(self):
        dirty = np.where(VALID[:, None], X, np.nan)
        choice = soft_moe_weights(dirty, SLOTS, valid=VALID)
        dispatch, combine = slow_weights(X[VALID], SLOTS)
        np.testing.assert_allclose(choice.dispatch[VALID], dispatch, atol=1e-6)
        np.testing.assert_allclose(choice.combine[VALID], combine, atol=1e-6)
        np.testing.assert_array_equal(choice.dispatch[~VALID], 0)
        np.testing.assert_array_equal(choice.combine[~VALID], 0)

    def test_masked_experts_are_as_if_they_were_not_there(self):
        mask = np.array([True, False, True])
        choice = soft_moe_weights(X, SLOTS, expert_mask=mask)
        dispatch, combine = slow_weights(X, SLOTS[:, mask])
        np.testing.assert_allclose(choice.dispatch[:, mask], dispatch, atol=1e-6)
        np.testing.assert_allclose(choice.combine[:, mask], combine, atol=1e-6)
        np.testing.assert_array_equal(choice.dispatch[:, 1], 0)
        np.testing.assert_array_equal(choice.combine[:, 1], 0)

    def test_gradients_against_finite_differences(self):
        weight = jax.random.normal(jax.random.key(2), (2, 6, 3, 2))

        @jax.jit
        def f(x, slots):
            choice = eager_soft_moe_weights(x, slots)
            return jnp.sum(choice.dispatch * weight[0]) + jnp.sum(choice.combine * weight[1])

        check_grads(f, (X, SLOTS), order=1, atol=2e-2, rtol=2e-2, eps=1e-2)

    def test_shapes_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"x, slots: got shapes \(6, 5\), \(4, 3, 2\)"):
            eager_soft_moe_weights(X, SLOTS[:4])


class TestMergeWeights:
    LOGITS = np.asarray(jax.random.normal(jax.random.key(3), (6, 4)))

    def test_is_the_softmax_of_the_mean_tokens_logits(self):
        w = jax.random.normal(jax.random.key(4), (5, 4))
        merge = jax.jit(merge_weights, static_argnums=1)(linear_logits(jnp.asarray(X), w), 2)
        expected = softmax(X.reshape(2, 3, 5).mean(axis=1) @ np.asarray(w), 1)
        np.testing.assert_allclose(merge.weight, expected, atol=1e-6)

    def test_counts_valid_tokens_only(self):
        merge = merge_weights(jnp.where(VALID[:, None], self.LOGITS, jnp.nan), 2, valid=VALID)
        expected = [self.LOGITS[[0, 2]].mean(axis=0), self.LOGITS[[3, 5]].mean(axis=0)]
        np.testing.assert_allclose(merge.weight, softmax(np.array(expected), 1), atol=1e-6)
        np.testing.assert_array_equal(merge.valid, VALID)

    def test_a_sequence_without_tokens_has_no_expert(self):
        valid = np.array([True] * 3 + [False] * 3)
        merge = merge_weights(self.LOGITS, 2, valid=valid)
        np.testing.assert_allclose(jnp.sum(merge.weight, axis=1), [1, 0], atol=1e-6)

    def test_gradients_against_finite_differences(self):
        weight = jax.random.normal(jax.random.key(5), (2, 4))
        f = jax.jit(lambda z: jnp.sum(merge_weights(z, 2).weight * weight))
        check_grads(f, (self.LOGITS,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)

    def test_sequences_must_be_of_equal_length(self):
        with pytest.raises(ValueError, match="num_sequences: got 4; allowed: divisors of 6"):
            merge_weights(self.LOGITS, 4)


class TestSoftMoE:
    ROUTER = make_router("soft_moe", k=1, slots_per_expert=2)
    WEIGHTS = {"slots": SLOTS, "scale": np.float32(3.0)}

    def route(self, x, num_sequences=1, **inputs):
        inputs = RouterInputs(jnp.asarray(x), **inputs)
        route = jax.jit(self.ROUTER.route, static_argnames="num_sequences")
        return route(inputs, self.WEIGHTS, {}, num_sequences=num_sequences)

    def test_tokens_and_slots_have_norm_one(self):
        choice = self.route(X).choice
        x = X / np.linalg.norm(X, axis=1, keepdims=True)
        slots = 3 * SLOTS / np.linalg.norm(SLOTS, axis=0, keepdims=True)
        dispatch, combine = slow_weights(x, slots)
        np.testing.assert_allclose(choice.dispatch[0], dispatch, atol=1e-6)
        np.testing.assert_allclose(choice.combine[0], combine, atol=1e-6)

    def test_sequences_do_not_mix(self):
        both = self.route(X, 2).choice
        other = self.route(np.concatenate([X[:3], X[:3] + 1]), 2).choice
        alone = self.route(X[:3]).choice
        for choice in (both, other):
            np.testing.assert_allclose(choice.dispatch[0], alone.dispatch[0], atol=1e-6)
            np.testing.assert_allclose(choice.combine[0], alone.combine[0], atol=1e-6)

    def test_logits_are_those_of_the_experts_share(self):
        routed = self.route(X, expert_mask=jnp.array([True, False, True]))
        np.testing.assert_allclose(jnp.exp(routed.logits), routed.choice.probs, rtol=1e-5)
        np.testing.assert_array_equal(routed.logits[:, 1], -np.inf)

    def test_sees_the_future_and_repeats_nothing(self):
        assert self.ROUTER.sees_future == "always"
        with pytest.raises(ValueError, match="chosen: got a choice"):
            self.route(X, chosen=jnp.zeros((6, 1), jnp.int32))


class TestSmear:
    ROUTER = make_router("smear", k=1)
    WEIGHTS = {"kernel": np.eye(4, dtype=np.float32)}

    def test_masked_experts_have_no_part(self):
        mask = np.array([True, True, False, True])
        inputs = RouterInputs(jnp.asarray(TestMergeWeights.LOGITS), expert_mask=jnp.asarray(mask))
        weight = self.ROUTER.route(inputs, self.WEIGHTS, {}, num_sequences=2).choice.weight
        mean = TestMergeWeights.LOGITS.reshape(2, 3, 4).mean(axis=1)[:, mask]
        np.testing.assert_allclose(weight[:, mask], softmax(mean, 1), atol=1e-6)
        np.testing.assert_array_equal(weight[:, 2], 0)

    def test_sees_the_future_and_repeats_nothing(self):
        assert self.ROUTER.sees_future == "always"
        inputs = RouterInputs(jnp.zeros((6, 4)), chosen=jnp.zeros((6, 1), jnp.int32))
        with pytest.raises(ValueError, match="chosen: got a choice"):
            self.ROUTER.route(inputs, self.WEIGHTS, {})


def test_a_matrix_is_one_slot_per_expert():
    x, slots = jax.random.normal(jax.random.key(0), (5, 3)), jnp.arange(12.0).reshape(3, 4)
    matrix, stack = soft_moe_weights(x, slots), soft_moe_weights(x, slots[:, :, None])
    assert matrix.dispatch.shape == (5, 4, 1)
    jax.tree.map(np.testing.assert_array_equal, matrix, stack)
