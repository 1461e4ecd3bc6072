"""Rotary positions against complex rotation and the property that defines them."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import rotate


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by_complex_numbers(x, positions, base):
    """Reference: features (i, i + D/2) as a complex number, times exp(1j * angle)."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    frequency = float(base) ** (-2 * np.arange(half) / x.shape[-1])
    z = z * np.exp(1j * np.asarray(positions)[..., None, None] * frequency)
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("size", [2, 4, 10])
def test_equals_complex_rotation(size):
    x = np.random.default_rng(0).normal(size=(2, 5, 3, size)).astype(np.float32)
    positions = np.array([0, 1, 2, 7, 100])
    expected = by_complex_numbers(x, positions, base=100.0)
    np.testing.assert_allclose(rotate(x, positions, base=100.0), expected, atol=2e-5)


def test_golden_values():
    # D=4, base=100: pair 0 turns by 1 radian a position, pair 1 by 100^(-2/4) = 0.1.
    # Position 2: (1, 0) at pair 0 becomes (cos 2, sin 2), (0, 1) at pair 1 (-sin .2, cos .2).
    x = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4)  # pair 0 is features 0, 2
    out = rotate(x, jnp.array([2]), base=100.0).ravel()
    expected = [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)]
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_dot_products_depend_on_relative_position_only():
    query, key = normal(2, 1, 6, 2, 8)
    at = jnp.arange(6)

    def scores(shift):
        return jnp.einsum("bthd,bshd->bhts", rotate(query, at + shift), rotate(key, at + shift))

    np.testing.assert_allclose(scores(0), scores(37), atol=1e-4)
    moved_key = jnp.einsum("bthd,bshd->bhts", rotate(query, at), rotate(key, at + 1))
    assert np.abs(moved_key - scores(0)).max() > 0.1


def test_position_zero_is_the_identity_and_lengths_are_kept():
    x = normal(2, 4, 3, 6)
    np.testing.assert_array_equal(rotate(x, jnp.zeros(4, int)), x)
    out = rotate(x, jnp.arange(4) * 1000)
    np.testing.assert_allclose(
        jnp.linalg.norm(out, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_positions_may_differ_between_sequences():
    x = normal(2, 4, 3, 6)
    positions = jnp.array([[0, 1, 2, 3], [5, 6, 7, 8]])
    out = rotate(x, positions)
    for b in range(2):
        np.testing.assert_array_equal(out[b], rotate(x[b : b + 1], positions[b])[0])


def test_bfloat16_is_rotated_in_float32():
    # In bfloat16, position 1001 would round to 1000 and turn the pair by a radian too little.
    x = normal(1, 1, 1, 2).astype(jnp.bfloat16)
    out = rotate(x, jnp.array([1001]))
    assert out.dtype == jnp.bfloat16
    expected = rotate(x.astype(jnp.float32), jnp.array([1001])).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, expected)


def test_odd_head_size_is_refused():
    with pytest.raises(ValueError, match="head size 5; allowed: an even"):
        rotate(jnp.zeros((1, 1, 1, 5)), jnp.arange(1))
