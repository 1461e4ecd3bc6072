"""Gather, combine and gate gradient for Hopper: against the reference, and compiled for it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import reference, targets
from moe_jax.kernels.mosaic_gpu import compat, rows

interpreted = pytest.mark.skipif(
    not compat.HAS_INTERPRETER, reason="this jax cannot interpret GPU kernels"
)
CASES = {
    "as the hardware likes it": (8, 256, 2, jnp.float32),
    "two blocks of columns": (3, 4096, 2, jnp.bfloat16),
    "nothing is a multiple of anything": (7, 200, 3, jnp.float32),
    "narrower than a warpgroup": (5, 72, 1, jnp.bfloat16),
    "one of each": (1, 1, 1, jnp.float32),
}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def indices(seed, *shape, limit):
    """Some of them just past the limit, some far."""
    rng = np.random.default_rng(seed)
    index = rng.integers(0, limit, size=shape)
    index = np.where(rng.random(shape) < 0.2, limit, index)
    return jnp.asarray(np.where(rng.random(shape) < 0.1, 2**31 - 1, index), jnp.int32)


def check(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # One bfloat16 rounding of nearly equal float32 sums.
    tolerance = 1e-5 if got.dtype == jnp.float32 else 1e-2
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got == 0, want == 0)


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_match_the_reference(case):
    num_tokens, width, num_slots, dtype = CASES[case]
    num_rows = num_tokens * num_slots
    x = normal(0, num_tokens, width, dtype=dtype)
    expert_rows = normal(1, num_rows, width, dtype=dtype)
    token = indices(2, num_rows, limit=num_tokens)
    row = indices(3, num_tokens, num_slots, limit=num_rows)
    scale, gate = normal(4, num_rows), normal(5, num_tokens, num_slots)
    for factor in (None, scale):
        got = rows.gather(x, token, scale=factor, interpret=True)
        check(got, reference.gather(x, token, scale=factor))
    for factor in (None, gate):
        got = rows.combine(expert_rows, row, gate=factor, interpret=True)
        check(got, reference.combine(expert_rows, row, gate=factor))
    got = rows.gate_gradient(x, expert_rows, row, interpret=True)
    want = reference.gate_gradient(x, expert_rows, row)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got == 0, row >= num_rows)


@interpreted
def test_what_is_not_there_is_exactly_zero():
    # Whatever stands in its scale, its gate, its cotangent or the row read in its place.
    nan = jnp.full((4, 128), jnp.nan)
    missing = jnp.array([4, 5, 2**31 - 1, 4], jnp.int32)
    factor = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0])
    for scale in (None, factor):
        out = rows.gather(nan, missing, scale=scale, interpret=True)
        np.testing.assert_array_equal(out, np.zeros((4, 128)))
    for gate in (None, factor[:, None]):
        out = rows.combine(nan, missing[:, None], gate=gate, interpret=True)
        np.testing.assert_array_equal(out, np.zeros((4, 128)))
    out = rows.gate_gradient(nan, nan, missing[:, None], interpret=True)
    np.testing.assert_array_equal(out, np.zeros((4, 1)))


@interpreted
def test_an_empty_slot_beside_a_full_one():
    expert_rows = jnp.array([[1.0], [2.0], [jnp.nan]])
    row = jnp.array([[3, 1, 0], [0, 7, 3]], jnp.int32)
    gate = jnp.array([[jnp.nan, 10.0, 100.0], [1.0, jnp.inf, jnp.nan]])
    out = rows.combine(expert_rows, row, gate=gate, interpret=True)
    np.testing.assert_array_equal(out, [[120.0], [1.0]])


@interpreted
def test_sums_are_float32_and_in_the_order_of_the_slots():
    big = 2.0**24
    expert_rows = jnp.array([[1.0], [big], [-big], [big + 2]])
    row = jnp.array([[0, 1, 2], [1, 0, 2], [1, 2, 0]], jnp.int32)
    out = rows.combine(expert_rows, row, interpret=True)
    np.testing.assert_array_equal(out, [[0.0], [0.0], [1.0]])
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    out = rows.gate_gradient(ones, ones, jnp.zeros((1, 1), jnp.int32), interpret=True)
    np.testing.assert_array_equal(out, [[4096.0]])  # a running bfloat16 sum sticks at 256
    terms = jnp.array([[256.0], [1.0]], jnp.bfloat16)
    row = jnp.array([[0] + [1] * 9], jnp.int32)
    out = rows.combine(terms, row, interpret=True)
    np.testing.assert_array_equal(out.astype(jnp.float32), [[264.0]])  # bf16(265)


def test_nothing_to_do():
    none, some = jnp.zeros((0, 3), jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16)
    index = jnp.zeros((2, 2), jnp.int32)
    cases = (
        (rows.gather(none, index[0]), (2, 3), jnp.bfloat16),
        (rows.gather(some, index[0, :0]), (0, 3), jnp.bfloat16),
        (rows.combine(none, index), (2, 3), jnp.bfloat16),
        (rows.combine(some, index[:, :0]), (2, 3), jnp.bfloat16),
        (rows.gate_gradient(some, none, index), (2, 2), jnp.float32),
        (rows.gate_gradient(none, some, index[:0]), (0, 2), jnp.float32),
    )
    for out, shape, dtype in cases:
        assert (out.shape, out.dtype) == (shape, dtype)
        assert not jnp.any(out)


@interpreted
def test_one_program_and_the_same_bits():
    @jax.jit
    def run(x, row, gate):
        out = rows.combine(x, row, gate=gate, interpret=True)
        return out, rows.gate_gradient(out, x, row, interpret=True)

    x = normal(0, 5, 128)
    for seed in range(5):
        row, gate = indices(seed, 4, 2, limit=5), normal(seed, 4, 2)
        first, *others = [run(x, row, gate) for _ in range(10 if seed == 0 else 1)]
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b)
    assert run._cache_size() == 1


COMPILE = """
import jax, jax.numpy as jnp
from moe_jax.kernels.mosaic_gpu import rows
from moe_jax.kernels.targets import compile_for

def scaled(x, token, scale):
    return rows.gather(x, token, scale=scale)

def gated(x, row, gate):
    return rows.combine(x, row, gate=gate)

for dtype in (jnp.bfloat16, jnp.float32):
    for T, d, K in ((8192, 1024, 2), (1000, 200, 3), (1000, 72, 3), (512, 8192, 8)):
        x = jax.ShapeDtypeStruct((T, d), dtype)
        expert_rows = jax.ShapeDtypeStruct((T * K, d), dtype)
        token, row = (jax.ShapeDtypeStruct(s, jnp.int32) for s in [(T * K,), (T, K)])
        scale, gate = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(T * K,), (T, K)])
        for function, *arguments in (
            (rows.gather, x, token),
            (scaled, x, token, scale),
            (rows.combine, expert_rows, row),
            (gated, expert_rows, row, gate),
            (rows.gate_gradient, x, expert_rows, row),
        ):
            program = compile_for("h100", function, *arguments)
            text = program.as_text()
            assert text.count("custom_call_target") == 1 and "mosaic_gpu" in text
            copied = program.memory_analysis().temp_size_in_bytes
            assert (copied == 0) == (d % 128 == 0), (function, T, d, K, copied)
"""


@pytest.mark.compiler
def test_compiles_and_copies_nothing_that_fits():
    environment = {**os.environ, **targets.ENVIRONMENT}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
