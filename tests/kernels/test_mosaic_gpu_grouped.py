"""The grouped products for Hopper: numbers in jax's interpreter, programs from its GPU compiler."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import reference, targets
from moe_jax.kernels.mosaic_gpu import compat, grouped


@pytest.fixture(scope="module")
def interpreter():
    """Runs a kernel, as jax loads its interpreter at the first and then traces everything anew."""
    if not compat.HAS_INTERPRETER:
        pytest.skip("this jax has no interpreter of GPU kernels")
    lhs, rhs, sizes = _normal(0, 8, 64), _normal(1, 1, 64, 64), jnp.array([8])
    _run(grouped.matmul, lhs, rhs, sizes, interpret=True)


interpreted = pytest.mark.usefixtures("interpreter")


def _run(function, *args, **kwargs):
    """Waits for the result: other work on the CPU meanwhile can block the interpreter forever."""
    return jax.block_until_ready(function(*args, **kwargs))


# Groups that are empty, of one row, start and end within a tile and within eight rows; rows left.
ROUTINGS = ([60, 0, 9, 77], [0, 0, 0, 0], [0, 203, 0, 0], [1, 0, 0, 0], [3, 130, 5, 65])


def _normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _with_nan(array, sizes):
    """NaN in the rows past the sum of the sizes."""
    return jnp.where(jnp.arange(len(array)) >= sum(sizes), jnp.nan, array.T).T


def _close(got, want, rows=1):
    """Equal up to the rounding of the result, and of ``rows`` scaled rows summed."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=2**-7, atol=2**-7 * rows**0.5)


MATMULS = {
    "plain": dict(widths=(128, 320)),
    "padded": dict(widths=(72, 136), num_rows=203, dtype=jnp.float16, bias=True, scale=True),
    "transposed": dict(widths=(192, 64), transposed=True, scale=True),
}


@interpreted
@pytest.mark.parametrize("case", MATMULS)
def test_matmul(case):
    case = {"num_rows": 208, "dtype": jnp.bfloat16, "transposed": False} | MATMULS[case]
    (inner, width), num_rows, dtype = case["widths"], case["num_rows"], case["dtype"]
    shape = (4, width, inner) if case["transposed"] else (4, inner, width)
    lhs, rhs = _normal(0, num_rows, inner, dtype=dtype), _normal(1, *shape, dtype=dtype)
    bias = _normal(2, 4, width, dtype=dtype) if case.get("bias") else None
    scale = _normal(3, num_rows, dtype=jnp.float32) if case.get("scale") else None
    function = functools.partial(grouped.matmul, transposed=case["transposed"], bias=bias)
    function = jax.jit(functools.partial(function, interpret=True))
    for sizes in ROUTINGS if scale is None else ROUTINGS[::4]:
        left = _with_nan(lhs, sizes) / inner**0.5
        factor = None if scale is None else _with_nan(scale, sizes)
        got = _run(function, left, rhs, jnp.array(sizes), scale=factor)
        kept = dict(transposed=case["transposed"], bias=bias, scale=factor)
        _close(got, reference.matmul(left, rhs, jnp.array(sizes), **kept))
        assert not np.asarray(got[sum(sizes) :]).any()
    assert function._cache_size() == 1


@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_hidden(gated):
    lhs, weights = _normal(0, 203, 64), _normal(1, 2, 4, 64, 192) / 8
    bias = None if gated else _normal(2, 4, 192, dtype=jnp.float32)
    # Not 0 at 0, to see that rows past the sum are.
    activation = (lambda x: jax.nn.silu(x) + 1) if gated else jax.nn.gelu
    gate = weights[1] if gated else None

    @jax.jit
    def function(lhs, sizes):
        return grouped.hidden(lhs, weights[0], gate, bias, sizes, activation, interpret=True)

    for sizes in ROUTINGS[::4]:
        left = _with_nan(lhs, sizes)
        got = _run(function, left, jnp.array(sizes))
        _close(got, reference.hidden(left, weights[0], gate, bias, jnp.array(sizes), activation))
        assert (got[2] is None) != gated
        assert not any(np.asarray(x[sum(sizes) :]).any() for x in jax.tree.leaves(got))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outer(dtype):
    num_rows, left, right = (208, 192, 64) if dtype == "float32" else (203, 72, 136)
    lhs, rhs = _normal(0, num_rows, left), _normal(1, num_rows, right)
    scale = _normal(2, num_rows, dtype=jnp.float32) if dtype == "bfloat16" else None
    function = jax.jit(functools.partial(grouped.outer, dtype=dtype, interpret=True))
    for sizes in ROUTINGS[::2] if scale is None else ROUTINGS[::4]:
        rows = _with_nan(lhs, sizes), _with_nan(rhs, sizes)
        factor = None if scale is None else _with_nan(scale, sizes)
        got = _run(function, *rows, jnp.array(sizes), scale=factor)
        want = reference.outer(*rows, jnp.array(sizes), scale=factor, dtype=jnp.dtype(dtype))
        _close(got, want, rows=1 if scale is None else max(sizes))
        assert not np.asarray(got)[np.array(sizes) == 0].any()
    assert function._cache_size() == 1


@interpreted
def test_one_expert_and_ten_runs():
    lhs, rhs = _normal(0, 40, 64), _normal(1, 1, 64, 64)
    sizes = jnp.array([40])
    product = jax.jit(functools.partial(grouped.matmul, interpret=True))
    gradient = jax.jit(functools.partial(grouped.outer, dtype=jnp.float32, interpret=True))
    first = _run(product, lhs, rhs, sizes), _run(gradient, lhs, lhs, sizes)
    _close(first, (reference.matmul(lhs, rhs, sizes), lhs.T.astype(jnp.float32) @ lhs[None]))
    for _ in range(9):
        again = _run(product, lhs, rhs, sizes), _run(gradient, lhs, lhs, sizes)
        assert all(bool((x == y).all()) for x, y in zip(first, again, strict=True))


@interpreted
def test_float32_sums_of_16_bit_products():
    """A sum that 16-bit accumulation would lose: 1 and 511 times 2^-9."""
    lhs = jnp.full((8, 512), 2.0**-9, jnp.bfloat16).at[:, 0].set(1)
    rhs = jnp.ones((1, 512, 64), jnp.bfloat16)
    got = _run(grouped.matmul, lhs, rhs, jnp.array([8]), interpret=True)
    assert (np.asarray(got, np.float32) == np.float32(jnp.bfloat16(1 + 511 / 512))).all()


@pytest.mark.parametrize("sizes", [[60, 0, 9, 77], [0] * 4, [203, 0, 0, 0], [7, 1, 1, 194]])
def test_row_tiles(sizes):
    """Every row is in exactly one tile of its group, and the list of tiles is long enough."""
    num_rows = 208
    start, end = grouped._group_bounds(jnp.array(sizes), num_rows)
    used, group, first = grouped._row_tiles(start, end, num_rows)
    seen = []
    for g, f in zip(group[: used[0]].tolist(), first[: used[0]].tolist(), strict=True):
        assert f % 8 == 0
        seen += range(max(f, int(start[g])), min(f + 128, int(end[g])))
    assert seen == list(range(num_rows))
    assert used[0] <= len(group)


@pytest.mark.parametrize("width", [64, 1408, 4096, 14336])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bias_bytes", [0, 2, 4])
def test_tiling_fits_shared_memory(width, count, bias_bytes):
    tile, stages = grouped._tiling(width, count, bias_bytes)
    ring = stages * 2 * 64 * (128 + count * tile)
    staging = 2 * 2 * (64 * 64 * 2) + 2 * tile * bias_bytes
    assert ring + staging + 2048 <= 227 * 1024
    assert stages >= 3 and count * tile <= 256


def test_errors():
    lhs, rhs, sizes = _normal(0, 8, 64), _normal(1, 2, 64, 64), jnp.array([4, 4])
    with pytest.raises(ValueError, match="float32; allowed: bfloat16 or float16"):
        grouped.matmul(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes)
    with pytest.raises(ValueError, match="float16; allowed"):
        grouped.outer(lhs, lhs.astype(jnp.float16), sizes, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"rhs: got shape \(2, 64, 64\); allowed: \[3, 64, 64\]"):
        grouped.matmul(lhs, rhs, jnp.array([4, 4, 0]))
    with pytest.raises(ValueError, match=r"bias: got shape \(64,\); allowed: \[2, 64\]"):
        grouped.hidden(lhs, rhs, None, lhs[0], sizes, jax.nn.relu)
    big = jax.ShapeDtypeStruct((2**31 - 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="rows: got 2147483768; allowed: less than 2147483648"):
        jax.eval_shape(grouped.matmul, big, rhs, sizes)


PROGRAM = """
    import functools, json, jax, jax.numpy as jnp
    from moe_jax.kernels import targets
    from moe_jax.kernels.mosaic_gpu import grouped

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def hidden(activation):
        return lambda *args: grouped.hidden(*args, activation)

    found = {}
    for experts in (8, 64):
        rows, sizes = array(4096, 1024), array(experts, dtype=jnp.int32)
        matrix, bias = array(experts, 1024, 1408), array(experts, 1408)
        scale, cotangent = array(4096, dtype=jnp.float32), array(4096, 1408)
        cases = {
            "matmul": (grouped.matmul, rows, matrix, sizes),
            "all": (
                lambda x, w, n, b, s: grouped.matmul(x, w, n, transposed=True, bias=b, scale=s),
                cotangent, matrix, sizes, array(experts, 1024, dtype=jnp.float32), scale,
            ),
            "gelu": (hidden(jax.nn.gelu), rows, matrix, None, bias, sizes),
            "silu": (hidden(jax.nn.silu), rows, matrix, matrix, None, sizes),
            "relu": (hidden(jax.nn.relu), rows, matrix, matrix, bias, sizes),
            "outer": (functools.partial(grouped.outer, dtype=jnp.bfloat16), rows, cotangent, sizes),
            "float32": (
                lambda x, y, n, s: grouped.outer(x, y, n, scale=s, dtype=jnp.float32),
                rows, cotangent, sizes, scale,
            ),
        }
        for name, (function, *arguments) in cases.items():
            if experts == 64 and name not in ("matmul", "float32"):
                continue
            compiled = targets.compile_for("h100", function, *arguments)
            found[f"{name} {experts}"] = (
                compiled.as_text().count('custom_call_target="mosaic_gpu'),
                compiled.memory_analysis().temp_size_in_bytes,
            )
    print(json.dumps(found))
"""


@pytest.mark.compiler
def test_compiles_for_h100():
    environment = os.environ | targets.ENVIRONMENT | {"XLA_FLAGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "RuntimeError" in run.stderr and "topology" in run.stderr.lower():
        pytest.skip("the GPU compiler of jax is not installed")
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 9
    assert all(kernels == 1 for kernels, _ in found.values()), found
    # The list of row tiles; and the scaled rows, which are not of the experts.
    assert all(found[f"matmul {experts}"][1] < 16_384 for experts in (8, 64)), found
    assert found["float32 64"][1] - found["float32 8"][1] < 16_384, found
