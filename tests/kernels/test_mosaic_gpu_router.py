"""The router for Hopper: against the reference in the interpreter, and compiled for it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import reference, targets
from moe_jax.kernels.mosaic_gpu import compat, router

interpreted = pytest.mark.skipif(
    not compat.HAS_INTERPRETER, reason="this jax cannot interpret GPU kernels"
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(logits, k, valid=None):
    logits = jnp.asarray(logits, jnp.float32)
    valid = jnp.ones(len(logits), bool) if valid is None else jnp.asarray(valid)
    got = router.route(logits, k, valid, interpret=True)
    want = reference.route(logits, k, valid)
    for name, a, b in zip(("expert", "probability", "position", "counts"), got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if name == "probability":
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-12)
            np.testing.assert_array_equal(a == 0, b == 0)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
    return got


@interpreted
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"),
    [(1, 1, 1), (64, 8, 2), (65, 5, 3), (200, 5, 5), (130, 70, 8), (64, 256, 8)],
)
def test_matches_the_reference(num_tokens, num_experts, k):
    valid = np.random.default_rng(1).random(num_tokens) < 0.9
    compare(normal(0, num_tokens, num_experts), k, valid)


@interpreted
def test_equal_logits_go_to_the_lowest_expert():
    logits = np.random.default_rng(0).integers(-1, 2, size=(100, 12))
    logits[3] = 0
    expert, *_ = compare(logits, 4)
    np.testing.assert_array_equal(expert[3], [0, 1, 2, 3])


@interpreted
def test_minus_infinity_is_never_chosen():
    logits = normal(0, 90, 6)
    logits[np.random.default_rng(1).random(logits.shape) < 0.6] = -np.inf
    logits[5] = -np.inf
    expert, probability, position, _ = compare(logits, 4)
    np.testing.assert_array_equal(expert[5], 6)
    np.testing.assert_array_equal(probability[5], 0)
    np.testing.assert_array_equal(position[5], 360)


@interpreted
def test_invalid_tokens_may_hold_anything():
    logits = normal(0, 70, 5)
    valid = np.arange(70) % 3 > 0
    clean = router.route(jnp.asarray(logits), 2, jnp.asarray(valid), interpret=True)
    logits[~valid] = np.nan
    dirty = router.route(jnp.asarray(logits), 2, jnp.asarray(valid), interpret=True)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)


@interpreted
def test_no_valid_token():
    compare(normal(0, 70, 5), 2, np.zeros(70, bool))


@interpreted
def test_one_expert_takes_all():
    logits = normal(0, 150, 9)
    logits[:, 4] = 100
    _, _, position, counts = compare(logits, 1)
    np.testing.assert_array_equal(position[:, 0], np.arange(150))
    assert counts[4] == 150


@interpreted
def test_one_program_and_the_same_bits():
    valid = jnp.ones(70, bool)
    run = jax.jit(lambda logits: router.route(logits, 2, valid, interpret=True))
    for seed in range(5):
        logits = normal(seed, 70, 6)
        first, *others = [run(logits) for _ in range(10 if seed == 0 else 1)]
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b)
    assert run._cache_size() == 1


def test_no_tokens():
    out = router.route(jnp.zeros((0, 4)), 2, jnp.zeros(0, bool))
    assert [a.shape for a in out] == [(0, 2), (0, 2), (0, 2), (4,)]
    assert [a.dtype for a in out] == [jnp.int32, jnp.float32, jnp.int32, jnp.int32]


@pytest.mark.parametrize(
    ("shape", "k", "message"),
    [
        ((4, 257), 2, "num_experts: got 257; allowed: 1 to 256"),
        ((4, 3), 4, "k: got 4; allowed: 1 to 3"),
        ((4, 16), 9, "k: got 9; allowed: 1 to 8"),
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
import jax, jax.numpy as jnp
from moe_jax.kernels.mosaic_gpu import router
from moe_jax.kernels.targets import compile_for
for shape, k in [((8192, 64), 8), ((8192, 256), 8), ((1000, 5), 3), ((1, 1), 1)]:
    arguments = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], bool)
    program = compile_for("h100", lambda a, b: router.route(a, k, b), *arguments)
    assert "mosaic_gpu" in program.as_text(), (shape, k)
"""


@pytest.mark.compiler
def test_compiles():
    environment = {**os.environ, **targets.ENVIRONMENT}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
