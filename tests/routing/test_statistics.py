"""Statistics of the load: golden numbers and bounds."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.dispatch import moe
from moe_jax.routing import (
    ExpertChoice,
    ExpertMerge,
    SoftChoice,
    expert_counts,
    load_statistics,
    relu_gate,
    routing_statistics,
    top_k_softmax,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

statistics_of = jax.jit(routing_statistics)


def test_golden_load():
    # Counts (6,2,0,0): shares .75 .25; entropy -.75 ln .75 - .25 ln .25 = .562335; mean 2,
    # deviations 4 0 -2 -2, std sqrt(24/4) = 2.449490, CV 1.224745; 3 of 8 dropped.
    statistics = load_statistics(jnp.array([6, 2, 0, 0]), jnp.array([3, 0, 0, 0]))
    np.testing.assert_allclose(statistics.load_cv, 1.2247449, rtol=1e-6)
    np.testing.assert_allclose(statistics.load_entropy, 0.5623351, rtol=1e-6)
    assert statistics.max_share == 0.75
    assert statistics.dead_experts == 2
    assert statistics.dropped_fraction == 0.375


def test_no_load_has_no_nan():
    statistics = load_statistics(jnp.zeros(4), jnp.zeros(4))
    np.testing.assert_array_equal(jnp.stack(statistics), [0, 0, 0, 0, 4])


def test_counts_ignore_empty_slots_and_stay_exact():
    expert = jnp.concatenate([jnp.zeros(40_840, jnp.int32), jnp.full(100, 3)])
    np.testing.assert_array_equal(expert_counts(expert, 3), [40_840, 0, 0])


def test_routing_statistics_count_valid_tokens_only():
    logits = jnp.array([[0.0, 0.0, -jnp.inf], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    valid = jnp.array([True, False, True])
    statistics = statistics_of(
        top_k_softmax(logits, 2, valid=valid), jnp.zeros(3, jnp.int32), valid=valid
    )
    np.testing.assert_array_equal(statistics.load, [2, 2, 0])
    # Entropies ln 2 and ln 3, and their squares are the squared logsumexps.
    np.testing.assert_allclose(statistics.router_entropy, np.log(6) / 2, rtol=1e-6)
    np.testing.assert_allclose(
        statistics.router_z, (np.log(2) ** 2 + np.log(3) ** 2) / 2, rtol=1e-6
    )


def test_collapse_by_ties_is_reported():
    # Zero logits: all 16 tokens choose experts {0, 1}. With C = 4, 2 * 4 of 32 assignments survive:
    # 24/32 = .75 are dropped.
    routing = top_k_softmax(jnp.zeros((16, 8)), 2)
    experts = {"w_in": jnp.ones((8, 2, 3)), "w_out": jnp.ones((8, 3, 2))}
    _, dropped = jax.jit(functools.partial(moe, capacity=4))(jnp.ones((16, 2)), routing, experts)
    statistics = statistics_of(routing, dropped)
    np.testing.assert_array_equal(statistics.load, [16, 16, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(statistics.dropped, [12, 12, 0, 0, 0, 0, 0, 0])
    assert statistics.dropped_fraction == 0.75
    assert statistics.dead_experts == 6


def test_stacked_layers_by_vmap():
    logits = jax.random.normal(jax.random.key(0), (3, 10, 4))
    layers = jax.jit(jax.vmap(lambda z: top_k_softmax(z, 2)))(logits)
    statistics = jax.jit(jax.vmap(routing_statistics))(layers, jnp.zeros((3, 4), jnp.int32))
    assert statistics.load.shape == (3, 4) and statistics.load_cv.shape == (3,)
    np.testing.assert_array_equal(statistics.load.sum(axis=1), 20)


def test_a_router_of_zeros_without_load_has_no_nan():
    # Every logit is 0, so no ReLU gate is open.
    statistics = statistics_of(relu_gate(jnp.zeros((5, 4))), jnp.zeros(4, jnp.int32))
    assert all(np.isfinite(value).all() for value in statistics)
    assert statistics.unrouted_fraction == 1
    assert statistics.active_experts == 0
    assert statistics.dead_experts == 4
    np.testing.assert_allclose(statistics.router_entropy, np.log(4), rtol=1e-6)


def test_nothing_valid_has_no_nan():
    routing = top_k_softmax(jnp.zeros((5, 4)), 2)
    statistics = statistics_of(routing, jnp.zeros(4, jnp.int32), valid=jnp.zeros(5, bool))
    assert all(np.isfinite(value).all() for value in statistics)
    np.testing.assert_array_equal(statistics.load, 0)


def test_active_experts_and_unrouted_tokens():
    # Four valid tokens with 2, 1, 0 and 0 open gates: 3/4 per token, half of them without any.
    # The fifth is not counted.
    logits = jnp.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])
    valid = jnp.array([True, True, True, True, False])
    statistics = statistics_of(relu_gate(logits), jnp.zeros(2, jnp.int32), valid=valid)
    np.testing.assert_array_equal(statistics.load, [1, 2])
    assert statistics.active_experts == 0.75
    assert statistics.unrouted_fraction == 0.5


class TestOtherChoices:
    """Loads of choices that are not made token by token; they have no logits of their own."""

    PROBS = np.full((4, 2), 0.5, np.float32)
    LOGITS = np.zeros((4, 2), np.float32)

    def statistics(self, choice, valid=None):
        dropped = jnp.zeros(2, jnp.int32)
        return statistics_of(choice, dropped, valid=valid, logits=self.LOGITS)

    def test_expert_choice(self):
        # Expert 0 has tokens 0 and 1, expert 1 has 0 and an empty slot; 2 and 3 have nobody.
        token = jnp.array([[0, 1], [0, 4]])
        choice = ExpertChoice(token, jnp.where(token < 4, 0.5, 0.0), self.PROBS)
        statistics = self.statistics(choice)
        np.testing.assert_array_equal(statistics.load, [2, 1])
        assert statistics.active_experts == 0.75
        assert statistics.unrouted_fraction == 0.5
        # Without token 0 one assignment is left for three tokens, two of which have none.
        statistics = self.statistics(choice, jnp.array([False, True, True, True]))
        np.testing.assert_array_equal(statistics.load, [1, 0])
        np.testing.assert_allclose(statistics.active_experts, 1 / 3, rtol=1e-6)
        np.testing.assert_allclose(statistics.unrouted_fraction, 2 / 3, rtol=1e-6)

    @pytest.mark.parametrize(("sequences", "expected"), [((), 3), ((2,), 6)])
    def test_soft_moe(self, sequences, expected):
        # Three slots of each expert in each sequence.
        shape = (*sequences, 4 // math.prod(sequences), 2, 3)
        statistics = self.statistics(SoftChoice(jnp.ones(shape), jnp.ones(shape), self.PROBS))
        np.testing.assert_array_equal(statistics.load, [expected, expected])
        np.testing.assert_allclose(statistics.active_experts, 2 * expected / 4, rtol=1e-6)
        assert statistics.unrouted_fraction == 0

    def test_merged_experts(self):
        # Of the first sequence both tokens are in both experts, of the second one in expert 1.
        valid = jnp.array([True, True, True, False])
        choice = ExpertMerge(jnp.array([[0.5, 0.5], [0.0, 1.0]]), valid, self.PROBS)
        statistics = self.statistics(choice, valid)
        np.testing.assert_array_equal(statistics.load, [2, 3])
        np.testing.assert_allclose(statistics.active_experts, 5 / 3, rtol=1e-6)
        assert statistics.unrouted_fraction == 0
        np.testing.assert_allclose(statistics.router_z, np.log(2) ** 2, rtol=1e-6)
