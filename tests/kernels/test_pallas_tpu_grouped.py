"""The grouped products for TPU in the interpreter, against the reference backend.

Numbers are compared in the quick interpreter. The one of the TPU simulates copies and two cores
that share the parallel axes, fills memory with NaN, and looks for races.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels import reference
from moe_jax.kernels.pallas_tpu import grouped

# Three tiles of 32 rows and a last one that sticks out; widths that are no multiples of a block.
N, A, B, E = 107, 136, 200, 5
USED = 90
# Rows from USED on hold NaN. A strip with three groups; borders at those of tiles and strips; first
# and last group empty; one row; all rows in one group; no rows at all.
ROUTINGS = (
    (13, 5, 40, 1, 31),
    (32, 16, 0, 16, 26),
    (0, 10, 75, 5, 0),
    (0, 0, 1, 0, 0),
    (0, 0, 0, 90, 0),
    (90, 0, 0, 0, 0),
    (0, 0, 0, 0, 0),
)
# A border within a strip, an empty group, a whole tile, rows past the sum.
SIMULATED = (ROUTINGS[0], ROUTINGS[2])
SIMULATOR = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
)
TOLERANCE = {jnp.float32: dict(rtol=1e-5, atol=1e-5), jnp.bfloat16: dict(rtol=1e-2, atol=1e-2)}

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles along each axis."""
    monkeypatch.setattr(grouped, "_TILE_ROWS", (32,))
    monkeypatch.setattr(grouped, "_STRIP_ROWS", 16)
    monkeypatch.setattr(grouped, "_SMALLEST_PART", 128)
    monkeypatch.setattr(grouped, "_widths", lambda size: [min(size, 128)])


def _arrays(dtype, *, num_rows=N, used=USED, a=A, b=B, num_groups=E):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return dict(
        lhs=normal(num_rows, a).at[used:].set(jnp.nan),
        rhs=normal(num_rows, b).at[used:].set(jnp.nan),
        scale=normal(num_rows, dtype=jnp.float32).at[used:].set(jnp.nan),
        w=normal(num_groups, a, b) / np.sqrt(a).astype(dtype),
        w_gate=normal(num_groups, a, b) / np.sqrt(a).astype(dtype),
        bias=normal(num_groups, b),
    )


def _check(run, options, routings, dtype):
    """Compares run(module, options, sizes), an array or some or None, for each routing.

    Exactly 0 is asked for where the reference says so in whole rows or matrices.
    """
    function = jax.jit(functools.partial(run, grouped, options))
    for sizes in routings:
        sizes = jnp.array(sizes, jnp.int32)
        got = jax.tree.leaves(function(sizes))
        want = jax.tree.leaves(run(reference, {}, sizes))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            g, w = (np.asarray(x, np.float32) for x in (g, w))
            np.testing.assert_allclose(g, w, **TOLERANCE[dtype], err_msg=str(sizes))
            np.testing.assert_array_equal(g[~w.any(axis=tuple(range(1, w.ndim)))], 0)
    assert function._cache_size() == 1


def _matmul(dtype, *, transposed=False, epilogue=True):
    x = _arrays(dtype)
    w = jnp.swapaxes(x["w"], 1, 2) if transposed else x["w"]
    bias, scale = (x["bias"], x["scale"]) if epilogue else (None, None)

    def run(module, options, sizes):
        return module.matmul(
            x["lhs"], w, sizes, transposed=transposed, bias=bias, scale=scale, **options
        )

    return run


def _hidden(dtype, *, gated=True, biased=True, activation=jax.nn.gelu):
    x = _arrays(dtype)
    w_gate, bias = x["w_gate"] if gated else None, x["bias"] if biased else None

    def run(module, options, sizes):
        return module.hidden(x["lhs"], x["w"], w_gate, bias, sizes, activation, **options)

    return run


def _outer(dtype, *, scaled=True):
    x = _arrays(dtype)
    scale = x["scale"] if scaled else None

    def run(module, options, sizes):
        return module.outer(x["lhs"], x["rhs"], sizes, scale=scale, dtype=dtype, **options)

    return run


@pytest.mark.parametrize(
    "dtype, transposed, epilogue",
    [
        (jnp.float32, False, False),
        (jnp.float32, True, True),
        (jnp.bfloat16, False, True),
        (jnp.bfloat16, True, False),
    ],
)
def test_matmul(small_tiles, dtype, transposed, epilogue):
    run = _matmul(dtype, transposed=transposed, epilogue=epilogue)
    _check(run, dict(interpret=True), ROUTINGS, dtype)


@pytest.mark.parametrize(
    "dtype, gated, biased, activation",
    [
        (jnp.float32, False, True, jax.nn.gelu),
        (jnp.float32, True, False, jax.nn.silu),
        (jnp.bfloat16, True, True, jax.nn.relu),
    ],
)
def test_hidden(small_tiles, dtype, gated, biased, activation):
    run = _hidden(dtype, gated=gated, biased=biased, activation=activation)
    _check(run, dict(interpret=True), ROUTINGS, dtype)


@pytest.mark.parametrize(
    "dtype, scaled", [(jnp.float32, False), (jnp.float32, True), (jnp.bfloat16, False)]
)
def test_outer(small_tiles, dtype, scaled):
    _check(_outer(dtype, scaled=scaled), dict(interpret=True), ROUTINGS, dtype)


@pytest.mark.parametrize(
    "piece, dtype", [(_matmul, jnp.bfloat16), (_hidden, jnp.float32), (_outer, jnp.float32)]
)
def test_no_races_and_no_uninitialized_memory(small_tiles, capfd, piece, dtype):
    _check(piece(dtype), dict(interpret=SIMULATOR), SIMULATED, dtype)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("num_rows, num_groups, sizes", [(1, 1, [1]), (13, 20, [0] * 19 + [12])])
def test_few_rows_in_tiles_of_the_real_size(num_rows, num_groups, sizes):
    x = _arrays(jnp.float32, num_rows=num_rows, used=sum(sizes), a=8, b=24, num_groups=num_groups)

    def run(module, options, sizes):
        return (
            module.matmul(x["lhs"], x["w"], sizes, scale=x["scale"], **options),
            module.hidden(x["lhs"], x["w"], x["w_gate"], None, sizes, jax.nn.relu, **options),
            module.outer(x["lhs"], x["rhs"], sizes, scale=x["scale"], dtype=jnp.float32, **options),
        )

    _check(run, dict(interpret=True), [sizes], jnp.float32)


def test_products_of_bfloat16_are_summed_in_float32(small_tiles):
    """256 + 1 is 256 in bfloat16: a sum in it would lose all the ones."""

    @jax.jit
    def sums(lhs, w, rows):
        product = grouped.matmul(lhs, w, jnp.array([16]), interpret=True)
        sizes = jnp.array([64])
        return product, grouped.outer(rows, rows, sizes, dtype=jnp.float32, interpret=True)

    lhs = jnp.ones((16, 136), jnp.bfloat16).at[:, 0].set(256)
    rows = jnp.ones((64, 8), jnp.bfloat16).at[0].set(16)
    product, outer = sums(lhs, jnp.ones((1, 136, 8), jnp.bfloat16), rows)
    # 391 is no bfloat16, 392 is next to it.
    np.testing.assert_array_equal(np.asarray(product, np.float32), 392)
    np.testing.assert_array_equal(outer, 256 + 63)


@pytest.mark.parametrize("piece", [_hidden, _outer])
def test_ten_runs_are_equal_in_all_bits(small_tiles, piece):
    function = jax.jit(functools.partial(piece(jnp.float32), grouped, dict(interpret=True)))
    sizes = jnp.array(ROUTINGS[0])
    first = function(sizes)
    for _ in range(9):
        jax.tree.map(np.testing.assert_array_equal, function(sizes), first)


def test_no_rows_no_groups_no_width():
    def shapes(num_rows, num_groups, a, b):
        lhs, rhs = jnp.ones((num_rows, a)), jnp.ones((num_rows, b))
        sizes = jnp.zeros(num_groups, jnp.int32)
        w = jnp.ones((num_groups, a, b))
        return grouped.matmul(lhs, w, sizes), grouped.outer(lhs, rhs, sizes, dtype=jnp.float32)

    for sizes in [(0, 3, 4, 5), (6, 0, 4, 5), (6, 3, 4, 0), (6, 3, 0, 5)]:
        num_rows, num_groups, a, b = sizes
        product, sums = shapes(*sizes)
        np.testing.assert_array_equal(product, np.zeros((num_rows, b)))
        np.testing.assert_array_equal(sums, np.zeros((num_groups, a, b)))


@pytest.mark.parametrize("every_group", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_visited_once_and_little_else(seed, every_group):
    rng = np.random.default_rng(seed)
    num_groups, tile, strip = rng.integers(1, 9), 32, 16
    sizes = rng.integers(0, 60, num_groups) * rng.integers(0, 2, num_groups)
    num_tiles = -(-max(sizes.sum() + rng.integers(0, 70), 1) // tile)
    visits = grouped._visits(jnp.asarray(sizes), num_tiles, tile, every_group=every_group)
    visits = grouped._Visits(*map(np.asarray, visits))

    group_of_row = np.full(num_tiles * tile, -1)
    strips = 0
    for group, loaded, of_tile, begin, end in zip(*visits, strict=True):
        if begin < end:
            assert loaded == of_tile
            rows = slice(of_tile * tile + begin, of_tile * tile + end)
            assert (group_of_row[rows] == -1).all()
            group_of_row[rows] = group
            strips += -(-end // strip) - begin // strip
    expected = np.repeat(np.arange(num_groups), sizes)
    np.testing.assert_array_equal(group_of_row[: sizes.sum()], expected)
    assert (group_of_row[sizes.sum() :] == -1).all()
    assert strips * strip <= sizes.sum() + num_groups * strip

    # Blocks of the result are written one after the other, and each is.
    blocks, number = (visits.group, num_groups) if every_group else (visits.tile, num_tiles)
    np.testing.assert_array_equal(np.unique(blocks), np.arange(number))
    assert (np.diff(blocks) >= 0).all()
    # What has no rows loads nothing new.
    empty = (visits.begin == visits.end)[1:]
    if not every_group:
        assert (np.diff(visits.loaded)[empty] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows, num_groups", [(8, 64), (16384, 8), (65536, 256)])
@pytest.mark.parametrize("a, b", [(1, 1), (72, 1000), (1024, 4096), (14336, 4096), (4096, 32000)])
def test_tiles_fit_and_cover(dtype, num_rows, num_groups, a, b):
    lhs, rhs = (jax.ShapeDtypeStruct((num_rows, width), dtype) for width in (a, b))
    w = jax.ShapeDtypeStruct((num_groups, a, b), dtype)
    for tiles in (
        grouped._matmul_tiles(lhs, [w], b, 1),
        grouped._matmul_tiles(lhs, [w, w], b, 3),
        grouped._outer_tiles(lhs, rhs, num_groups, jnp.float32),
    ):
        strip, tile, a_tile, b_tile = tiles
        assert strip % 16 == 0 and tile % strip == 0
        for width, full in ((a_tile, a), (b_tile, b)):
            # Little is computed only to be cut off.
            assert width == full or (width % 128 == 0 and -(-full // width) * width < 1.25 * full)


def test_shapes_that_do_not_fit_are_refused():
    lhs, w, sizes = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([1, 2, 3])
    for wrong in (
        lambda: grouped.matmul(lhs[0], w, sizes),
        lambda: grouped.matmul(lhs, w[0], sizes),
        lambda: grouped.matmul(lhs, w, sizes, transposed=True),
        lambda: grouped.matmul(lhs, w, sizes[:2]),
        lambda: grouped.matmul(lhs, w, sizes, bias=jnp.ones((3, 4))),
        lambda: grouped.matmul(lhs, w, sizes, scale=jnp.ones((6, 1))),
        lambda: grouped.hidden(lhs, w, w[:, :, :4], None, sizes, jax.nn.relu),
        lambda: grouped.outer(lhs, lhs[:5], sizes, dtype=jnp.float32),
        lambda: grouped.outer(lhs, lhs, sizes, scale=jnp.ones(5), dtype=jnp.float32),
        lambda: grouped.outer(
            jax.ShapeDtypeStruct((2**31 - 1, 1), jnp.float32),
            jax.ShapeDtypeStruct((2**31 - 1, 1), jnp.float32),
            sizes,
            dtype=jnp.float32,
        ),
    ):
        with pytest.raises(ValueError, match="got .*; allowed: "):
            wrong()
