"""Statistics of the load: golden numbers and bounds."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.routing import expert_counts, load_statistics, routing_statistics, top_k_softmax


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
    statistics = routing_statistics(
        top_k_softmax(logits, 2, valid=valid), jnp.zeros(3, jnp.int32), valid=valid
    )
    np.testing.assert_array_equal(statistics.load, [2, 2, 0])
    # Entropies ln 2 and ln 3, and their squares are the squared logsumexps.
    np.testing.assert_allclose(statistics.router_entropy, np.log(6) / 2, rtol=1e-6)
    np.testing.assert_allclose(
        statistics.router_z, (np.log(2) ** 2 + np.log(3) ** 2) / 2, rtol=1e-6
    )


def test_collapse_by_ties_is_reported():
    # Zero logits: all 16 tokens choose experts {0, 1}.
    statistics = routing_statistics(top_k_softmax(jnp.zeros((16, 8)), 2), jnp.zeros(8, jnp.int32))
    np.testing.assert_array_equal(statistics.load, [16, 16, 0, 0, 0, 0, 0, 0])
    assert statistics.dead_experts == 6


def test_stacked_layers_by_vmap():
    logits = jax.random.normal(jax.random.key(0), (3, 10, 4))
    layers = jax.vmap(lambda z: top_k_softmax(z, 2))(logits)
    statistics = jax.vmap(routing_statistics)(layers, jnp.zeros((3, 4), jnp.int32))
    assert statistics.load.shape == (3, 4) and statistics.load_cv.shape == (3,)
    np.testing.assert_array_equal(statistics.load.sum(axis=1), 20)
