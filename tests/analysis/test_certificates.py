"""Radii of the choice: golden numbers, attained by a step over the boundary and not before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.analysis import certified_radius, exact_radius, gate_lipschitz

W = jnp.array([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]])
X = jnp.array([1.0, 0.2])


def test_golden():
    # z = (1, .2, -1.2). Top 1: .8 / |(1, -1)| = .8 / sqrt 2 against 2.2 / |(2, 1)| = .98387.
    np.testing.assert_allclose(exact_radius(X, W, 1), 0.565685425, rtol=1e-6)
    # Top 2 is {0, 1} against 2: 2.2 / sqrt 5 = .983870 and 1.4 / |(1, 2)| = 1.4 / sqrt 5 = .626099.
    np.testing.assert_allclose(exact_radius(X, W, 2), 0.626099034, rtol=1e-6)
    np.testing.assert_allclose(certified_radius(X, W, 1.0), 0.288194193, rtol=1e-6)
    # w w^T has the eigenvalues 3 and 1.
    np.testing.assert_allclose(gate_lipschitz(W, 2.0), np.sqrt(3) / 4, rtol=1e-6)
    assert exact_radius(X, W, 3) == np.inf


@pytest.mark.parametrize("gap", [0.1, 1.0, 4.0])
def test_two_opposite_experts(gap):
    # w = (v, -v) and a logit gap of g: exact / certified = (g / 2) / tanh(g / 2), 1.0819767 at 1.
    v = jnp.array([0.6, -0.8, 0.5])
    x = v * gap / (2 * jnp.sum(v * v))
    w = jnp.stack([v, -v], axis=1)
    ratio = exact_radius(x, w, 1) / certified_radius(x, w)
    np.testing.assert_allclose(ratio, (gap / 2) / np.tanh(gap / 2), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_set_changes_just_beyond_the_radius_and_not_within(k):
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(6, 5)), rng.normal(size=5)
    for x in rng.normal(size=(20, 6)):
        radius = float(exact_radius(jnp.asarray(x), jnp.asarray(w), k, jnp.asarray(b)))
        z = x @ w + b
        order = np.argsort(-z)
        chosen = set(order[:k])
        # The nearest boundary, by hand.
        pairs = [(i, j) for i in order[:k] for j in order[k:]]
        distance = {(i, j): (z[i] - z[j]) / np.linalg.norm(w[:, i] - w[:, j]) for i, j in pairs}
        i, j = min(distance, key=distance.get)
        np.testing.assert_allclose(radius, distance[i, j], rtol=1e-4)
        direction = (w[:, j] - w[:, i]) / np.linalg.norm(w[:, j] - w[:, i])
        moved = (x + 1.001 * radius * direction) @ w + b
        assert set(np.argsort(-moved)[:k]) != chosen
        for _ in range(20):
            step = rng.normal(size=6)
            inside = (x + 0.999 * radius * step / np.linalg.norm(step)) @ w + b
            assert set(np.argsort(-inside)[:k]) == chosen


# E = 8, d = 768, x ~ N(0, I), w of this standard deviation: median of exact / certified.
@pytest.mark.parametrize(
    "deviation, temperature, median",
    [
        (768**-0.5, 0.25, 1.57),
        (768**-0.5, 0.5, 1.63),
        (768**-0.5, 1.0, 2.03),
        (768**-0.5, 2.0, 2.72),
        (0.02, 0.25, 1.60),
        (0.02, 0.5, 1.94),
        (0.02, 1.0, 2.61),
        (0.02, 2.0, 3.27),
    ],
)
def test_the_certificate_is_sound_and_how_loose_it_is(deviation, temperature, median):
    keys = jax.random.split(jax.random.key(0))
    w = deviation * jax.random.normal(keys[0], (768, 8))
    x = jax.random.normal(keys[1], (4000, 768))
    ratio = np.asarray(exact_radius(x, w, 1) / certified_radius(x, w, temperature))
    assert ratio.min() >= 1
    np.testing.assert_allclose(np.median(ratio), median, rtol=0.06)


def test_equal_experts():
    w = jnp.array([[1.0, 1.0, 0.0]])
    assert exact_radius(jnp.array([1.0]), w, 1) == 0  # two best ones are tied everywhere
    np.testing.assert_allclose(exact_radius(jnp.array([1.0]), w, 2), 1.0)
    # A bias that sets equal experts apart: no token can make them change places.
    b = jnp.array([1.0, 0.0, -5.0])
    assert exact_radius(jnp.array([1.0]), w, 1, b) == 7.0  # expert 2 wins from x = -6 on


def test_inside_jit_vmap_and_grad():
    x = jax.random.normal(jax.random.key(0), (7, 2))
    batch = jax.jit(lambda x: exact_radius(x, W, 1))(x)
    np.testing.assert_allclose(batch, jax.vmap(lambda x: exact_radius(x, W, 1))(x), rtol=1e-6)
    # On the way to its boundary the radius shrinks by the distance: a gradient of norm 1.
    gradient = jax.grad(lambda x: exact_radius(x, W, 1))(X)
    np.testing.assert_allclose(jnp.linalg.norm(gradient), 1.0, rtol=1e-5)


def test_k_out_of_range_is_refused():
    with pytest.raises(ValueError, match="k: got 4; allowed: 1..3"):
        exact_radius(X, W, 4)
