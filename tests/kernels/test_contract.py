"""One contract for all backends: every piece against the reference, every gradient against a loop.

The kernels for accelerators run in their interpreters, with uninitialised memory full of NaN.
"""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.kernels import grouped, reference, rows
from moe_jax.kernels.experts import dropless_experts
from moe_jax.kernels.rows import assignment_of_row

pytestmark = pytest.mark.usefixtures("quick_compilation")


def xla_cpu():
    from moe_jax.kernels.xla_cpu import BACKEND

    return BACKEND


def pallas_tpu():
    from moe_jax.kernels.pallas_tpu.backend import interpreted

    return interpreted()


def mosaic_gpu():
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("jax has an interpreter for GPU kernels from 0.11.2")
    from moe_jax.kernels.mosaic_gpu.backend import interpreted

    return interpreted()


def xla_ragged():
    from moe_jax.kernels.ragged import XLA

    return XLA


def tokamax():
    if importlib.util.find_spec("tokamax") is None:
        pytest.skip("tokamax is not installed")
    from moe_jax.kernels.ragged import TOKAMAX_ON_CPU

    return TOKAMAX_ON_CPU


MAKERS = (
    xla_cpu,
    xla_ragged,
    tokamax,
    pytest.param(pallas_tpu, marks=pytest.mark.interpreted),
    pytest.param(mosaic_gpu, marks=pytest.mark.interpreted),
)
INTERPRETED = (pallas_tpu, mosaic_gpu)
# Widths and sizes that are multiples of no tile, except where a kernel refuses them.
WIDTHS = {mosaic_gpu: (72, 136)}
DTYPES = {mosaic_gpu: (jnp.bfloat16,)}
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
# One shape for all, so that every backend is compiled once.
NUM_ROWS = 160
SIZES = {
    "nobody at all": [0, 0, 0, 0, 0],
    "one row": [0, 0, 1, 0, 0],
    "empty groups, rows past the sum": [3, 0, 2, 0, 60],
    "one group takes all": [0, 160, 0, 0, 0],
    "no size a multiple of anything": [7, 61, 0, 53, 39],
}


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__, scope="module")
def maker(request):
    return request.param


@pytest.fixture(scope="module")
def backend(maker):
    return maker()


def dtypes_of(maker):
    return DTYPES.get(maker, (jnp.float32, jnp.bfloat16))


def draw(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)


# The interpreters call back into jax, which can wait for ever if it has other work meanwhile.
finished = jax.block_until_ready


def assert_close(got, want, dtype, name=""):
    """Within the tolerance of the dtype, of the largest entry that there should be."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * scale, rtol=0, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def grouped_pieces(backend, groups, lhs, w, w2, bias, cotangent, scale):
    return (
        backend.matmul(lhs, w, groups, bias=bias, scale=scale),
        backend.matmul(cotangent, w, groups, transposed=True),
        backend.hidden(lhs, w, None, bias, groups, jax.nn.gelu)[:2],
        backend.hidden(lhs, w, w2, None, groups, jax.nn.silu),
        backend.outer(lhs, cotangent, groups, scale=scale, dtype=jnp.float32),
        backend.outer(lhs, cotangent, groups, dtype=lhs.dtype),
    )


def test_grouped_products_match_the_reference(maker, backend):
    a, b = WIDTHS.get(maker, (70, 33))
    for dtype, (name, sizes) in itertools.product(dtypes_of(maker), SIZES.items()):
        rng = np.random.default_rng(0)
        groups, total = jnp.array(sizes, jnp.int32), sum(sizes)
        arguments = (
            groups,
            # What stands past the sum must not be read into anything.
            draw(rng, (NUM_ROWS, a), dtype).at[total:].set(jnp.nan),
            draw(rng, (5, a, b), dtype),
            draw(rng, (5, a, b), dtype),
            draw(rng, (5, b), dtype),
            draw(rng, (NUM_ROWS, b), dtype).at[total:].set(jnp.nan),
            draw(rng, (NUM_ROWS,), jnp.float32),
        )
        got = finished(grouped_pieces(backend, *arguments))
        assert_close(got, grouped_pieces(reference.BACKEND, *arguments), dtype, name)
        for past in (got[0], got[1], *got[2], *got[3]):
            np.testing.assert_array_equal(past[total:].astype(jnp.float32), 0, err_msg=name)
        for d_w in got[4:]:
            np.testing.assert_array_equal(d_w[groups == 0].astype(jnp.float32), 0, err_msg=name)
    assert grouped_pieces._cache_size() <= 2 * 2 * len(MAKERS)


@functools.partial(jax.jit, static_argnums=0)
def row_pieces(backend, x, values, row, token, gate, scale):
    return (
        backend.gather(x, token),
        backend.gather(x, token, scale=scale),
        backend.combine(values, row),
        backend.combine(values, row, gate=gate),
        backend.gate_gradient(x, values, row),
    )


@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 3, 40), (37, 2, 200)])
def test_moves_of_rows_match_the_reference(maker, backend, shape):
    num_tokens, num_slots, width = shape
    rng = np.random.default_rng(1)
    row = rng.permutation(num_tokens * num_slots).reshape(num_tokens, num_slots)
    row = jnp.asarray(np.where(rng.random(row.shape) < 0.2, 2**31 - 1, row), jnp.int32)
    token = assignment_of_row(row, row.size) // num_slots
    for dtype in (jnp.float32, jnp.bfloat16):
        x = draw(rng, (num_tokens, width), dtype)
        # A row of nobody may hold anything.
        values = jnp.where(
            (token < num_tokens)[:, None], draw(rng, (row.size, width), dtype), jnp.nan
        )
        gate = jnp.where(row < row.size, draw(rng, row.shape, jnp.float32), jnp.nan)
        scale = jnp.where(token < num_tokens, draw(rng, token.shape, jnp.float32), jnp.nan)

        arguments = (x, values, row, token, gate, scale)
        want = row_pieces(reference.BACKEND, *arguments)
        assert_close(finished(row_pieces(backend, *arguments)), want, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(1, 1, 1), (37, 5, 2), (300, 160, 8), (9, 8, 8)]
)
def test_routing_matches_the_reference(backend, num_tokens, num_experts, k):
    rng = np.random.default_rng(2)
    # Rounded, so that there are ties.
    logits = jnp.asarray(np.round(rng.normal(size=(num_tokens, num_experts)), 1), jnp.float32)
    logits = logits.at[:, num_experts // 2].set(-jnp.inf)
    valid = jnp.asarray(rng.random(num_tokens) < 0.8)
    got = finished(backend.route(logits, k, valid))
    want = reference.BACKEND.route(logits, k, valid)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_array_equal(got[3], want[3])


def slow_experts(x, gate, experts, expert, activation):
    """Every expert on every token, weighed by the gates of the slots that hold it."""
    y = jnp.zeros(x.shape, jnp.float32)
    for e in range(experts["w_in"].shape[0]):
        one = {name: weight[e].astype(jnp.float32) for name, weight in experts.items()}
        u = x.astype(jnp.float32) @ one["w_in"] + one.get("b_in", 0)
        h = (
            activation(x.astype(jnp.float32) @ one["w_gate"]) * u
            if "w_gate" in one
            else activation(u)
        )
        weight = jnp.sum(jnp.where(expert == e, gate, 0.0), axis=1)[:, None]
        # Not 0 * NaN.
        y += jnp.where(weight != 0, weight * (h @ one["w_out"] + one.get("b_out", 0)), 0)
    return y.astype(x.dtype)


def layer_case(maker, dtype, *, num_tokens=37, num_experts=5, glu=True, bias=True, seed=3):
    d, f = WIDTHS.get(maker, (24, 40))
    rng = np.random.default_rng(seed)
    experts = {
        "w_in": draw(rng, (num_experts, d, f), dtype) / d**0.5,
        "w_out": draw(rng, (num_experts, f, d), dtype) / f**0.5,
    }
    if glu:
        experts["w_gate"] = draw(rng, (num_experts, d, f), dtype) / d**0.5
    if bias:
        experts["b_in"] = draw(rng, (num_experts, f), dtype)
        experts["b_out"] = draw(rng, (num_experts, d), dtype)
    experts = {name: weight.astype(dtype) for name, weight in experts.items()}
    return draw(rng, (num_tokens, d), dtype), experts, route_randomly(rng, num_tokens, num_experts)


def route_randomly(rng, num_tokens, num_experts, num_slots=2):
    """Some tokens with one expert or none; the last expert has nobody."""
    first = rng.integers(0, num_experts, num_tokens)
    second = (first + rng.integers(1, max(num_experts, 2), num_tokens)) % num_experts
    expert = np.stack([first, second], axis=1)[:, :num_slots]
    empty = (rng.random(expert.shape) < 0.2) | (expert == num_experts - 1)
    gate = np.where(empty, 0, rng.random(expert.shape))
    return jnp.array(np.where(empty, num_experts, expert)), jnp.array(gate, jnp.float32)


def layer(backend, x, gate, experts, expert, activation):
    num_experts = experts["w_in"].shape[0]
    flat = expert.ravel()
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    row = jnp.zeros(flat.size, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    row = jnp.where(flat < num_experts, row, 2**31 - 1).reshape(expert.shape)
    assignment = assignment_of_row(row, row.size)
    return dropless_experts(backend, activation, x, gate, experts, row, assignment, sizes)


def with_gradients(function):
    """(output, gradients in x, gate and experts) of a function, jitted."""

    def loss(x, gate, experts, expert):
        y = function(x, gate, experts, expert)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    def run(x, gate, experts, expert):
        gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate, experts, expert)
        return y, gradients

    return jax.jit(run)


@functools.cache
def fast_layer(backend):
    return with_gradients(functools.partial(layer, backend, activation=jax.nn.gelu))


@functools.cache
def slow_layer():
    return with_gradients(functools.partial(slow_experts, activation=jax.nn.gelu))


@pytest.mark.parametrize(("glu", "bias"), [(False, False), (True, True)])
def test_the_layer_and_every_gradient_match_the_loop(maker, backend, glu, bias):
    dtypes = dtypes_of(maker)
    if maker in INTERPRETED:  # which are slow: one dtype a case
        dtypes = dtypes[-1:] if glu else dtypes[:1]
    for dtype in dtypes:
        x, experts, (expert, gate) = layer_case(maker, dtype, glu=glu, bias=bias)
        y, gradients = finished(fast_layer(backend)(x, gate, experts, expert))
        slow_y, (d_x, d_gate, d_experts) = slow_layer()(x, gate, experts, expert)
        # The loop gives an empty slot a gradient, which nothing asks for.
        slow = (slow_y, (d_x, jnp.where(expert < 5, d_gate, 0), d_experts))
        assert_close((y, gradients), slow, dtype)
        for name, leaf in gradients[2].items():
            np.testing.assert_array_equal(leaf[-1].astype(jnp.float32), 0, err_msg=name)


def test_five_routings_one_compilation_and_equal_runs(maker, backend):
    # In the interpreters, which are slow, three and two; each piece's own tests run all.
    routings, repeats = (3, 1) if maker in INTERPRETED else (5, 9)
    dtype = dtypes_of(maker)[-1]
    x, experts, _ = layer_case(maker, dtype)
    run, before = fast_layer(backend), fast_layer(backend)._cache_size()
    for seed in range(routings):
        expert, gate = route_randomly(np.random.default_rng(seed), 37, 5)
        out = finished(run(x, gate, experts, expert))
    assert run._cache_size() <= before + 1
    for _ in range(repeats):
        again = finished(run(x, gate, experts, expert))
        jax.tree.map(np.testing.assert_array_equal, out, again)


def test_a_nan_stays_with_its_token_and_its_experts(maker, backend):
    dtype = dtypes_of(maker)[-1]
    x, experts, (expert, gate) = layer_case(maker, dtype)
    token = int(np.argmax(np.all(np.asarray(expert) < 5, axis=1)))
    run = fast_layer(backend)
    nan = finished(x.at[token].set(jnp.nan))
    y, (d_x, _, d_experts) = finished(run(nan, gate, experts, expert))
    others = np.arange(37) != token
    assert np.isfinite(np.asarray(y[others], np.float32)).all()
    assert np.isfinite(np.asarray(d_x[others], np.float32)).all()
    strangers = ~np.isin(np.arange(5), expert[token])
    for name, leaf in d_experts.items():
        assert np.isfinite(np.asarray(leaf[strangers], np.float32)).all(), name


def test_finite_differences():
    # Of the layer that everything else is compared with; the backends need float32 for it.
    backend = xla_cpu()
    x, experts, (expert, gate) = layer_case(xla_cpu, jnp.float32, num_tokens=6, num_experts=3)

    @jax.jit
    def loss(x, gate, experts):
        return jnp.sum(jnp.sin(layer(backend, x, gate, experts, expert, jax.nn.gelu)))

    check_grads(loss, (x, gate, experts), order=1, modes=("rev",), atol=3e-2, rtol=3e-2, eps=1e-2)


def test_grouped_matmul_and_rows_have_gradients(maker, backend):
    dtype = dtypes_of(maker)[-1]
    a, b = WIDTHS.get(maker, (70, 33))
    rng = np.random.default_rng(5)
    groups = jnp.array([4, 0, 9], jnp.int32)
    lhs, rhs = draw(rng, (16, a), dtype), draw(rng, (3, a, b), dtype)
    cotangent = draw(rng, (16, b), dtype)

    def gradients(backend):
        _, pull = jax.vjp(lambda *ab: grouped.matmul(backend, *ab, groups), lhs, rhs)
        return finished(pull(cotangent))

    assert_close(gradients(backend), gradients(reference.BACKEND), dtype)

    row = jnp.array([[3, 0], [2**31 - 1, 1], [2, 2**31 - 1]], jnp.int32)
    assignment = assignment_of_row(row, 5)
    x, gate = draw(rng, (3, a), dtype), draw(rng, (3, 2), jnp.float32)
    there_and_back = draw(rng, (3, a), dtype)

    def moved(backend):
        def run(x, gate):
            return rows.from_rows(
                backend, rows.to_rows(backend, x, row, assignment), gate, row, assignment
            )

        y, pull = jax.vjp(run, x, gate)
        return finished((y, pull(there_and_back)))

    assert_close(moved(backend), moved(reference.BACKEND), dtype)
