"""Grouped matmul against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.kernels import grouped_matmul, xla_cpu
from moe_jax.kernels.xla_cpu import tile_sizes

pytestmark = pytest.mark.usefixtures("quick_compilation")


def slow_grouped_matmul(lhs, rhs, sizes, cotangent):
    """Output and both gradients, group by group."""
    out, d_lhs, d_rhs = np.zeros(cotangent.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[group]
        d_lhs[rows] = cotangent[rows] @ rhs[group].T
        d_rhs[group] = lhs[rows].T @ cotangent[rows]
        start += size
    return out, d_lhs, d_rhs


SIZES = {
    "one row": ([1], 1),
    "nobody at all": ([0, 0], 5),
    "empty groups, rows past the sum": ([3, 0, 2, 0], 8),
    "one group takes all": ([0, 300, 0, 0], 300),
    "one row each": ([1] * 64, 64),
    "around a tile": ([15, 16, 17, 31, 32, 33, 47, 9], 200),
    "several full tiles": ([130, 1, 2, 3], 137),
    "no size a multiple of anything": ([7, 61, 0, 101, 29, 2], 211),
}


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("widths", [(4, 3), (72, 65)])
def test_matches_the_loop(case, widths):
    sizes, num_rows = SIZES[case]
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(num_rows, widths[0])).astype(np.float32)
    rhs = rng.normal(size=(len(sizes), *widths)).astype(np.float32)
    cotangent = rng.normal(size=(num_rows, widths[1])).astype(np.float32)
    # What stands past the sum must not be read into anything.
    lhs[sum(sizes) :] = np.nan
    out, vjp = jax.vjp(lambda a, b: grouped_matmul(a, b, jnp.array(sizes)), lhs, rhs)
    d_lhs, d_rhs = vjp(cotangent)
    expected = slow_grouped_matmul(np.nan_to_num(lhs), rhs, sizes, cotangent)
    for got, want in zip((out, d_lhs, d_rhs), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(d_rhs[np.array(sizes) == 0], 0)


def test_every_split_of_random_sizes():
    rng = np.random.default_rng(1)
    lhs = rng.normal(size=(150, 8)).astype(np.float32)
    rhs = rng.normal(size=(6, 8, 5)).astype(np.float32)
    cotangent = rng.normal(size=(150, 5)).astype(np.float32)

    @jax.jit
    def run(lhs, rhs, sizes, cotangent):
        out, vjp = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)
        return out, *vjp(cotangent)

    for _ in range(30):
        sizes = rng.multinomial(rng.integers(0, 151), rng.dirichlet(np.full(6, 0.5)))
        expected = slow_grouped_matmul(lhs, rhs, sizes, cotangent)
        for got, want in zip(
            run(lhs, rhs, sizes.astype(np.int32), cotangent), expected, strict=True
        ):
            np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)
    assert run._cache_size() == 1


def test_finite_differences():
    sizes = jnp.array([5, 0, 19, 2])
    lhs = jax.random.normal(jax.random.key(0), (28, 3))
    rhs = jax.random.normal(jax.random.key(1), (4, 3, 2))
    check_grads(
        lambda a, b: jnp.sum(jnp.sin(grouped_matmul(a, b, sizes))),
        (lhs, rhs),
        order=1,
        modes=("rev",),
        atol=2e-2,
        rtol=2e-2,
    )


def test_bf16_accumulates_in_float32():
    # 4096 ones: a running bfloat16 sum sticks at 256.
    sizes = jnp.array([40, 60])
    out = grouped_matmul(jnp.ones((100, 4096), jnp.bfloat16), jnp.ones((2, 4096, 8)), sizes)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 4096)
    rhs = jnp.ones((2, 3, 8), jnp.bfloat16)
    weight_gradient = jax.grad(
        lambda w: jnp.sum(grouped_matmul(jnp.ones((3000, 3), w.dtype), w, jnp.array([2500, 500])))
    )(rhs)
    assert weight_gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight_gradient[1].astype(jnp.float32), 500)
    np.testing.assert_array_equal(weight_gradient[0].astype(jnp.float32), 2496)  # bf16(2500)


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (5, 8), (100, 3), (8192, 8)])
def test_the_ladder_is_rising_and_covers_a_fair_share(num_rows, num_groups):
    sizes = tile_sizes(num_rows, num_groups)
    assert sizes == sorted(set(sizes))
    assert min(num_rows, 2 * num_rows // num_groups) <= sizes[-1] <= num_rows


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"got lhs \(3, 4\), rhs \(2, 5, 6\)"):
        grouped_matmul(jnp.ones((3, 4)), jnp.ones((2, 5, 6)), jnp.array([1, 2]))
    with pytest.raises(ValueError, match=r"group_sizes: got shape \(3,\); allowed: \(2,\)"):
        grouped_matmul(jnp.ones((3, 4)), jnp.ones((2, 4, 6)), jnp.array([1, 1, 1]))


def test_no_group_and_sizes_of_other_integers():
    assert grouped_matmul(jnp.ones((3, 4)), jnp.ones((0, 4, 6)), jnp.zeros(0, int)).shape == (3, 6)
    # 200 + 200 is more than a uint8 holds.
    sizes = np.array([200, 200], np.uint8)
    out = grouped_matmul(
        jnp.ones((400, 4)), jnp.stack([jnp.ones((4, 6)), jnp.zeros((4, 6))]), sizes
    )
    np.testing.assert_array_equal(out[:, 0], np.repeat([4.0, 0.0], 200))
    with pytest.raises(ValueError, match="group_sizes: got dtype float32; allowed: integers"):
        grouped_matmul(jnp.ones((3, 4)), jnp.ones((1, 4, 6)), jnp.ones(1))


def test_a_nan_stays_in_its_group():
    lhs = jnp.ones((8, 4)).at[5].set(jnp.nan)
    gradient = jax.grad(lambda w: jnp.sum(grouped_matmul(lhs, w, jnp.array([4, 4])) ** 2))(
        jnp.ones((2, 4, 3))
    )
    assert np.isfinite(gradient[0]).all() and np.isnan(gradient[1]).all()


def test_weight_gradients_of_rows_of_whole_pages(monkeypatch):
    monkeypatch.setattr(xla_cpu, "_SLOW_ON_PAGES", True)
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(2, 40, 6)), jnp.float32)
    rhs = jnp.asarray(rng.normal(size=(2, 3, 6, 1024)), jnp.float32)
    sizes = jnp.array([[7, 0, 30], [1, 39, 0]])

    def gradient(lhs, rhs, sizes):
        return jax.grad(lambda w: jnp.sum(jnp.sin(grouped_matmul(lhs, w, sizes))))(rhs)

    for got in (jax.vmap(gradient)(lhs, rhs, sizes), jnp.stack([*map(gradient, lhs, rhs, sizes)])):
        for i in range(2):
            cotangent = jnp.cos(grouped_matmul(lhs[i], rhs[i], sizes[i]))
            _, _, want = slow_grouped_matmul(lhs[i], rhs[i], [*map(int, sizes[i])], cotangent)
            np.testing.assert_allclose(got[i], want, atol=2e-5, rtol=1e-5)
