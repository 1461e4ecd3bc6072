"""The TPU row kernels against the reference, in the interpreter, and compiled for every TPU."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels import reference, targets
from moe_jax.kernels.pallas_tpu import rows as tpu_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
gather = functools.partial(tpu_rows.gather, interpret=INTERPRETER)
combine = functools.partial(tpu_rows.combine, interpret=INTERPRETER)
gate_gradient = functools.partial(tpu_rows.gate_gradient, interpret=INTERPRETER)

DTYPES = [jnp.float32, jnp.bfloat16]


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def indices(limit, *shape, seed=0):
    """Random rows; about every fourth does not exist, by little or by much."""
    rng = np.random.default_rng(seed)
    past = np.where(rng.random(shape) < 0.5, limit, limit + rng.integers(2**30, size=shape))
    row = np.where(rng.random(shape) < 0.25, past, rng.integers(max(limit, 1), size=shape))
    return jnp.asarray(row, jnp.int32)


def assert_same(got, want, tolerance=0.0):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.dtype == jnp.bfloat16:
        tolerance = max(tolerance, 2**-8)  # one rounding apart
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles with few tokens."""
    monkeypatch.setattr(tpu_rows, "_LARGEST_TILE", 16)


SHAPES = [
    # T, N, K, d: one of each; no multiple of anything; one and several whole tiles.
    (1, 1, 1, 1),
    (5, 9, 3, 72),
    (33, 20, 2, 200),
    (32, 64, 1, 256),
    (18, 11, 4, 300),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, num_rows, num_slots, width", SHAPES)
def test_like_the_reference(num_tokens, num_rows, num_slots, width, dtype):
    rows, row = normal(num_rows, width, dtype=dtype), indices(num_rows, num_tokens, num_slots)
    gate = normal(num_tokens, num_slots, seed=1)
    cotangent = normal(num_tokens, width, dtype=dtype, seed=2)
    assert_same(combine(rows, row, gate=gate), reference.combine(rows, row, gate=gate), 1e-6)
    assert_same(
        gate_gradient(cotangent, rows, row), reference.gate_gradient(cotangent, rows, row), 1e-4
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_copies_bits(dtype):
    x, token = normal(20, 72, dtype=dtype), indices(20, 20)
    special = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 3e38], dtype)
    x = x.at[3, :6].set(special).at[4, -6:].set(special)
    token = token.at[:2].set(jnp.array([3, 4]))
    got, want = gather(x, token), reference.gather(x, token)
    assert_same(got, want)
    np.testing.assert_array_equal(jnp.signbit(got), jnp.signbit(want))
    scale = normal(20, seed=1)
    assert_same(gather(x, token, scale=scale), reference.gather(x, token, scale=scale), 1e-6)
    assert_same(combine(x, token[:, None]), want)


def test_a_row_that_does_not_exist_is_exactly_0():
    dtype = jnp.bfloat16
    rows = normal(6, 40, dtype=dtype).at[0].set(jnp.nan)
    row = jnp.array([[1, 6], [7, 2**31 - 1], [6, 2]], jnp.int32)
    gate = jnp.array([[1, jnp.nan], [jnp.inf, jnp.nan], [-jnp.inf, 1]])
    got = combine(rows, row, gate=gate)
    assert_same(got, jnp.stack([rows[1], jnp.zeros_like(rows[0]), rows[2]]))
    token = jnp.array([6, 2, 7], jnp.int32)
    got = gather(rows, token, scale=jnp.array([jnp.nan, 1, jnp.inf]))
    assert_same(got, jnp.zeros_like(got).at[1].set(rows[2]))
    cotangent = jnp.full((3, 40), jnp.nan, dtype)
    got = gate_gradient(cotangent, rows, row)
    np.testing.assert_array_equal(np.isnan(got), np.asarray(row) < 6)
    np.testing.assert_array_equal(got[np.asarray(row) >= 6], 0)


@pytest.mark.usefixtures("small_tiles")
def test_not_a_single_row_exists():
    row = jnp.full((20, 2), 5, jnp.int32)
    np.testing.assert_array_equal(combine(normal(5, 8), row), np.zeros((20, 8)))
    np.testing.assert_array_equal(
        gate_gradient(normal(20, 8), normal(5, 8), row), np.zeros((20, 2))
    )


@pytest.mark.parametrize("sizes", [(0, 3, 2, 4), (3, 0, 2, 4), (3, 3, 0, 4), (3, 3, 2, 0)])
def test_nothing_to_do(sizes):
    num_tokens, num_rows, num_slots, width = sizes
    rows, row = jnp.ones((num_rows, width)), jnp.zeros((num_tokens, num_slots), jnp.int32)
    out, gradient = combine(rows, row), gate_gradient(jnp.ones((num_tokens, width)), rows, row)
    np.testing.assert_array_equal(out, np.zeros((num_tokens, width)))
    np.testing.assert_array_equal(gradient, np.zeros(row.shape))


def test_bfloat16_is_summed_in_float32_and_in_order():
    rows = jnp.array([[256.0], [1.0]], jnp.bfloat16)
    row = jnp.array([[0] + [1] * 6])
    # In bfloat16 256 + 1 is 256.
    assert combine(rows, row).item() == 262
    # (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1.
    rows, row = jnp.array([[1e8], [1.0], [-1e8]]), jnp.array([[0, 1, 2], [0, 2, 1]])
    np.testing.assert_array_equal(combine(rows, row), [[0], [1]])
    cotangent = jnp.ones((1, 3000), jnp.bfloat16)
    assert gate_gradient(cotangent, cotangent, jnp.array([[0]])).item() == 3000


def test_five_routings_one_compilation_and_ten_runs_bit_equal():
    function = jax.jit(lambda rows, row: combine(rows, row))
    rows = normal(9, 24)
    for seed in range(5):
        row = indices(9, 7, 2, seed=seed)
        assert_same(function(rows, row), reference.combine(rows, row), 1e-6)
    assert function._cache_size() == 1
    first, *others = (function(rows, row) for _ in range(10))
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_other_dtypes_are_refused():
    rows, row = jnp.ones((2, 3), jnp.float16), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="rows: got dtype float16; allowed: float32, bfloat16"):
        tpu_rows.combine(rows, row)
    with pytest.raises(ValueError, match="cotangent: got dtype float16"):
        tpu_rows.gate_gradient(rows, rows, row)


@pytest.mark.parametrize("width", [1, 200, 1024, 7168, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_a_tile_fits_into_the_memory(num_slots, dtype, width):
    tile = tpu_rows._tile_tokens(jnp.empty((1, width), dtype), jnp.empty((8192, num_slots)))
    assert tile % 16 == 0 and 16 <= tile <= 256
    fetched = 2 * num_slots * tile * max(width, 128) * dtype.dtype.itemsize
    assert fetched <= 0.5 * tpu_rows._VMEM_BYTES


COMPILE = """
import itertools, sys
import jax, jax.numpy as jnp
from moe_jax.kernels.pallas_tpu import rows as tpu_rows
from moe_jax.kernels.targets import compile_for

def compile(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    program = compile_for(sys.argv[1], function, *arguments)
    assert "tpu_custom_call" in program.as_text(), shapes

# T, N, K, d
sizes = [(8192, 16384, 2, 1024), (1000, 3000, 3, 200), (3, 1, 5, 72), (4096, 8192, 8, 7168)]
for (t, n, k, d), dtype in itertools.product(sizes, (jnp.float32, jnp.bfloat16)):
    x, rows = ((t, d), dtype), ((n, d), dtype)
    row, gate = ((t, k), jnp.int32), ((t, k), jnp.float32)
    token, scale = ((n,), jnp.int32), ((n,), jnp.float32)
    compile(lambda x, token, scale: tpu_rows.gather(x, token, scale=scale), x, token, scale)
    compile(lambda rows, row, gate: tpu_rows.combine(rows, row, gate=gate), rows, row, gate)
    compile(tpu_rows.gate_gradient, x, rows, row)
"""


@pytest.mark.compiler
@pytest.mark.parametrize("target", [t for t in targets.TARGETS if t != "h100"])
def test_compiles(target):
    environment = {**os.environ, **targets.ENVIRONMENT}
    subprocess.run([sys.executable, "-c", COMPILE, target], env=environment, check=True)
