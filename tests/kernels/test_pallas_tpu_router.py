"""The TPU router against the reference, in the interpreter, and compiled for every TPU."""

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
from moe_jax.kernels.pallas_tpu import router

pytestmark = pytest.mark.usefixtures("quick_compilation")

INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
route = functools.partial(router.route, interpret=INTERPRETER)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(logits, k, valid=None):
    logits = np.asarray(logits, np.float32)
    valid = np.ones(len(logits), bool) if valid is None else valid
    got, want = route(logits, k, valid), reference.route(logits, k, valid)
    for name, a, b in zip(("expert", "probability", "position", "counts"), got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if name == "probability":
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-12)
            np.testing.assert_array_equal(a == 0, b == 0)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
    return got


@pytest.mark.parametrize(
    "num_tokens, num_experts, k",
    [
        (1, 1, 1),
        (3, 5, 3),
        (200, 8, 2),
        (256, 64, 8),
        (300, 5, 5),
        (600, 100, 3),
        (257, 256, 8),
    ],
)
def test_like_the_reference(num_tokens, num_experts, k):
    rng = np.random.default_rng(1)
    compare(normal(num_tokens, num_experts), k, rng.random(num_tokens) < 0.8)


def test_equal_logits_go_to_the_lowest_index():
    expert, *_ = compare(np.zeros((130, 12)), 3)
    np.testing.assert_array_equal(expert, [[0, 1, 2]] * 130)
    # Few distinct values, zeros of both signs among them.
    compare(np.round(normal(130, 12)), 3)


def test_minus_infinity_is_an_empty_slot():
    logits = normal(270, 6)
    logits[np.random.default_rng(2).random(logits.shape) < 0.5] = -np.inf
    logits[7] = -np.inf
    expert, probability, position, _ = compare(logits, 4)
    np.testing.assert_array_equal(expert[7], 6)
    np.testing.assert_array_equal(probability[7], 0)
    np.testing.assert_array_equal(position[7], 270 * 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite(bad):
    logits = normal(140, 7)
    logits[3, 2], logits[4] = bad, bad
    logits[5, 1], logits[5, 2] = bad, -np.inf
    compare(logits, 3)
    compare(logits, 7)


def test_one_expert_takes_all_and_counts_go_on_from_tile_to_tile():
    logits = normal(700, 9)
    logits[:, 4] = 10
    _, _, position, counts = compare(logits, 1)
    np.testing.assert_array_equal(position[:, 0], np.arange(700))
    np.testing.assert_array_equal(counts, [0, 0, 0, 0, 700, 0, 0, 0, 0])


def test_invalid_tokens_may_hold_anything():
    logits, valid = normal(300, 10), np.random.default_rng(3).random(300) < 0.5
    got = compare(logits, 2, valid)
    logits[~valid] = np.nan
    for a, b in zip(got, route(logits, 2, valid), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(compare(logits, 2, np.zeros(300, bool))[3].sum()) == 0


def test_no_tokens():
    compare(np.zeros((0, 4)), 2)


def test_five_routings_one_compilation_and_ten_runs_bit_equal():
    function = jax.jit(route, static_argnums=1)
    valid = np.ones(150, bool)
    for seed in range(5):
        function(normal(150, 6, seed=seed), 2, valid)
    assert function._cache_size() == 1
    first, *others = (function(normal(150, 6), 2, valid) for _ in range(10))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize(
    "shape, k, message",
    [
        ((4, 257), 2, "num_experts: got 257; allowed: 1 to 256"),
        ((4, 64), 9, "k: got 9; allowed: 1 to 8"),
        ((4, 3), 4, "k: got 4; allowed: 1 to 3"),
        ((4, 3), 0, "k: got 0; allowed: 1 to 3"),
        ((2**30, 8), 2, r"T\*k: got 2147483648; allowed: less than 2\*\*31"),
    ],
)
def test_refusals(shape, k, message):
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    valid = jax.ShapeDtypeStruct(shape[:1], bool)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda a, b: router.route(a, k, b), logits, valid)


COMPILE = """
import sys
import jax, jax.numpy as jnp
from moe_jax.kernels.pallas_tpu import router
from moe_jax.kernels.targets import compile_for
for shape, k in [((8192, 64), 8), ((8192, 256), 8), ((1000, 5), 3), ((1, 1), 1)]:
    arguments = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], bool)
    program = compile_for(sys.argv[1], lambda a, b: router.route(a, k, b), *arguments)
    assert "tpu_custom_call" in program.as_text(), (shape, k)
"""


@pytest.mark.compiler
@pytest.mark.parametrize("target", [t for t in targets.TARGETS if t != "h100"])
def test_compiles(target):
    environment = {**os.environ, **targets.ENVIRONMENT}
    subprocess.run([sys.executable, "-c", COMPILE, target], env=environment, check=True)
