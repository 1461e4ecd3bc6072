"""The three dispatchers against a loop over experts: outputs, drops and every gradient."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.dispatch import IMPLEMENTATIONS, PRIORITIES, capacity, moe, positions
from moe_jax.routing import softmax_top_k, top_k_softmax

pytestmark = pytest.mark.usefixtures("quick_compilation")
# Tests on the backend of the device. The others are of what is done around it, and have the
# reference, which compiles in a tenth of the time; tests/kernels holds all backends to it.
ON_THE_DEVICE = {
    "test_matches_the_loop",
    "test_under_vmap_and_remat",
    "test_inside_shard_map_with_all_checks",
    "test_nothing_of_another_expert_reaches_a_gradient",
}


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    if request.node.originalname not in ON_THE_DEVICE:
        module = sys.modules["moe_jax.dispatch.moe"]  # the package has a function of that name
        select = module.select
        monkeypatch.setattr(
            module, "select", lambda dtype, widths, name: select(dtype, widths, name or "reference")
        )


def slow_drop(routing, num_experts, capacity, priority):
    """Who is kept, expert i64[T, K] with E for nobody, and the drop counts; on concrete arrays."""
    position = positions(routing.expert, num_experts, priority=priority, gate=routing.gate)
    kept, dropped = np.array(routing.expert), np.zeros(num_experts, int)
    for t, j in np.ndindex(kept.shape):
        if capacity is not None and kept[t, j] < num_experts and position[t, j] >= capacity:
            dropped[kept[t, j]] += 1
            kept[t, j] = num_experts
    return kept, dropped


def slow_moe(x, gate, experts, kept, activation):
    """Every expert on every token, weighed by the gates of the slots that hold it."""
    y = jnp.zeros_like(x)
    for e in range(experts["w_in"].shape[0]):
        one = {name: weight[e] for name, weight in experts.items()}
        hidden = x @ one["w_in"] + one.get("b_in", 0.0)
        if "w_gate" in one:
            hidden = activation(x @ one["w_gate"]) * hidden
        else:
            hidden = activation(hidden)
        weight = jnp.sum(jnp.where(kept == e, gate, 0.0), axis=1)
        y += weight[:, None] * (hidden @ one["w_out"] + one.get("b_out", 0.0))
    return y


def make_case(num_tokens=37, d=6, f=10, num_experts=5, *, glu=False, bias=False, seed=0):
    keys = jax.random.split(jax.random.key(seed), 7)
    normal = jax.random.normal
    experts = {
        "w_in": normal(keys[0], (num_experts, d, f)) / d**0.5,
        "w_out": normal(keys[1], (num_experts, f, d)) / f**0.5,
    }
    if glu:
        experts["w_gate"] = normal(keys[2], (num_experts, d, f)) / d**0.5
    if bias:
        experts["b_in"] = normal(keys[3], (num_experts, f))
        experts["b_out"] = normal(keys[4], (num_experts, d))
    x = normal(keys[5], (num_tokens, d))
    return x, normal(keys[6], (d, num_experts)), experts


def assert_like_the_loop(
    implementation, case, route, *, capacity=None, priority="arrival", activation="gelu"
):
    """Output, drop counts and the gradients of x, the router and every expert weight."""
    x, router, experts = case
    kept, want_dropped = slow_drop(route(x @ router), experts["w_in"].shape[0], capacity, priority)
    weight = jnp.cos(jnp.arange(x.size)).reshape(x.shape)

    def fast(x, router, experts):
        y, dropped = moe(
            x,
            route(x @ router),
            experts,
            implementation=implementation,
            capacity=capacity,
            priority=priority,
            activation=activation,
        )
        return jnp.sum(y * weight) + jnp.sum(y**2), (y, dropped)

    def slow(x, router, experts):
        act = getattr(jax.nn, activation)
        y = slow_moe(x, route(x @ router).gate, experts, kept, act)
        return jnp.sum(y * weight) + jnp.sum(y**2), y

    run = jax.jit(jax.value_and_grad(fast, argnums=(0, 1, 2), has_aux=True))
    (_, (y, dropped)), gradients = run(*case)
    (_, want_y), want = jax.jit(jax.value_and_grad(slow, argnums=(0, 1, 2), has_aux=True))(*case)
    np.testing.assert_array_equal(dropped, want_dropped)
    np.testing.assert_allclose(y, want_y, atol=1e-5)
    for (path, got), (_, expected) in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves_with_path(want), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-5, err_msg=str(path))


ROUTE_2 = functools.partial(softmax_top_k, k=2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestAllImplementations:
    """One contract for all of them."""

    @pytest.mark.parametrize(
        ("glu", "bias", "limit"), [(0, 0, None), (1, 0, 6), (0, 1, 6), (1, 1, None)]
    )
    def test_matches_the_loop(self, implementation, glu, bias, limit):
        case = make_case(num_tokens=23, glu=glu, bias=bias)
        assert_like_the_loop(implementation, case, ROUTE_2, capacity=limit, activation="silu")

    @pytest.mark.parametrize("priority", PRIORITIES)
    def test_priorities(self, implementation, priority):
        assert_like_the_loop(
            implementation, make_case(num_tokens=23, seed=1), ROUTE_2, capacity=5, priority=priority
        )

    @pytest.mark.parametrize(
        ("num_tokens", "num_experts", "k"),
        [(1, 1, 1), (1, 4, 2), (13, 3, 3), (5, 16, 2)],
    )
    def test_small_and_odd_sizes(self, implementation, num_tokens, num_experts, k):
        case = make_case(num_tokens=num_tokens, num_experts=num_experts, bias=True)
        assert_like_the_loop(implementation, case, functools.partial(softmax_top_k, k=k))

    def test_renormalised_gates_and_invalid_tokens(self, implementation):
        valid = np.arange(19) % 3 > 0
        route = functools.partial(top_k_softmax, k=2, valid=valid)
        case = make_case(num_tokens=19, bias=True)
        assert_like_the_loop(implementation, case, route, capacity=4)
        y, _ = moe(case[0], route(case[0] @ case[1]), case[2], implementation=implementation)
        np.testing.assert_array_equal(y[~valid], 0)

    def test_an_expert_without_tokens_gets_zero_gradient(self, implementation):
        x, router, experts = make_case(num_tokens=12, bias=True)

        def route(logits):
            return softmax_top_k(logits.at[:, 2].set(-jnp.inf), 2)

        assert_like_the_loop(implementation, (x, router, experts), route)
        gradient = jax.grad(
            lambda w: jnp.sum(moe(x, route(x @ router), w, implementation=implementation)[0])
        )(experts)
        for name, leaf in gradient.items():
            np.testing.assert_array_equal(leaf[2], 0, err_msg=name)

    def test_all_tokens_invalid(self, implementation):
        x, router, experts = make_case(num_tokens=7, bias=True)

        def total(x, experts):
            routing = softmax_top_k(x @ router, 2, valid=jnp.zeros(7, bool))
            y, dropped = moe(x, routing, experts, implementation=implementation, capacity=2)
            return jnp.sum(y), (y, dropped)

        gradients, (y, dropped) = jax.grad(total, (0, 1), has_aux=True)(x, experts)
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_array_equal(dropped, 0)
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), gradients)

    def test_what_stands_in_an_invalid_token_is_not_seen(self, implementation):
        x, router, experts = make_case(num_tokens=5)
        valid = jnp.array([True, False, True, True, False])
        routing = softmax_top_k(x @ router, 2, valid=valid)

        def total(x):
            y, _ = moe(x, routing, experts, implementation=implementation)
            return jnp.sum(y**2), y

        dirty = jnp.where(valid[:, None], x, jnp.array([[jnp.nan], [jnp.nan], [0], [0], [jnp.inf]]))
        gradient, y = jax.grad(total, has_aux=True)(dirty)
        clean_gradient, clean = jax.grad(total, has_aux=True)(x)
        np.testing.assert_array_equal(y, clean)
        np.testing.assert_array_equal(gradient, clean_gradient)

    def test_output_has_the_dtype_of_the_tokens(self, implementation):
        x, router, experts = make_case(num_tokens=5)
        y, _ = moe(
            x.astype(jnp.bfloat16),
            softmax_top_k(x @ router, 2),
            experts,
            implementation=implementation,
            capacity=10**9,
        )
        assert y.dtype == jnp.bfloat16

    def test_capacity_is_enforced_and_dropped_rows_are_zero(self, implementation):
        # Five tokens, all to expert 0, two places: tokens 2, 3, 4 get exactly 0.
        x, _, experts = make_case(num_tokens=5, num_experts=3, bias=True)
        routing = top_k_softmax(jnp.tile(jnp.array([[9.0, 0, 0]]), (5, 1)), 1)
        y, dropped = moe(x, routing, experts, implementation=implementation, capacity=2)
        np.testing.assert_array_equal(dropped, [3, 0, 0])
        np.testing.assert_array_equal(y[2:], 0)
        assert (jnp.abs(y[:2]) > 0).all()

    def test_collapse_by_ties(self, implementation):
        # Zero logits: 16 tokens all choose experts 0 and 1, C = 4: 8 of 32 survive.
        x, _, experts = make_case(num_tokens=16, num_experts=8)
        routing = top_k_softmax(jnp.zeros((16, 8)), 2)
        limit = capacity(16, 8, 2, 1.0)
        assert limit == 4
        _, dropped = moe(x, routing, experts, implementation=implementation, capacity=limit)
        np.testing.assert_array_equal(dropped, [12, 12, 0, 0, 0, 0, 0, 0])

    def test_rows_of_other_tokens_do_not_leak(self, implementation):
        x, router, experts = make_case(num_tokens=9)
        run = jax.jit(
            lambda x: moe(x, softmax_top_k(x @ router, 2), experts, implementation=implementation)[
                0
            ]
        )
        changed = run(x.at[4].set(-x[4]))
        others = np.arange(9) != 4
        np.testing.assert_allclose(run(x)[others], changed[others], atol=1e-6)

    def test_ten_runs_are_bit_equal(self, implementation):
        x, router, experts = make_case(num_tokens=256, num_experts=16)
        x = x.astype(jnp.bfloat16)
        experts = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), experts)
        run = jax.jit(
            lambda x: moe(x, softmax_top_k(x @ router, 8), experts, implementation=implementation)[
                0
            ]
        )
        first = run(x)
        assert first.dtype == jnp.bfloat16
        for _ in range(9):
            np.testing.assert_array_equal(run(x), first)

    def test_bf16_is_near_float32(self, implementation):
        x, router, experts = make_case(num_tokens=64, bias=True)
        routing = softmax_top_k(x @ router, 2)
        y, _ = moe(x, routing, experts, implementation=implementation)
        low, _ = moe(
            x.astype(jnp.bfloat16),
            routing,
            jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), experts),
            implementation=implementation,
        )
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(low.astype(jnp.float32), y, atol=0.03 * scale)

    def test_finite_differences(self, implementation):
        x, router, experts = make_case(num_tokens=6, d=3, f=4, num_experts=3, bias=True)
        routing = softmax_top_k(2 * x @ router, 2)

        def f(x, gate, experts):
            held = routing._replace(gate=gate)
            return jnp.sum(jnp.sin(moe(x, held, experts, implementation=implementation)[0]))

        check_grads(
            f, (x, routing.gate, experts), order=1, modes=("rev",), atol=3e-2, rtol=3e-2, eps=1e-2
        )

    def test_under_vmap_and_remat(self, implementation):
        x, router, experts = make_case(num_tokens=10)

        def f(x):
            return moe(x, softmax_top_k(x @ router, 2), experts, implementation=implementation)[0]

        np.testing.assert_allclose(jax.vmap(f)(jnp.stack([x, -x]))[1], f(-x), atol=1e-5)
        plain = jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)
        remat = jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2))(x)
        np.testing.assert_allclose(plain, remat, atol=1e-6)

    def test_one_compilation_for_all_routings(self, implementation):
        x, _, experts = make_case(num_tokens=10)
        run = jax.jit(
            lambda z: moe(x, softmax_top_k(z, 2), experts, implementation=implementation)[0]
        )
        for seed in range(5):
            run(jax.random.normal(jax.random.key(seed), (10, 5)))
        assert run._cache_size() == 1

    def test_any_callable_is_an_activation(self, implementation):
        x, router, experts = make_case(num_tokens=10)
        routing = softmax_top_k(x @ router, 2)
        by_name, _ = moe(x, routing, experts, implementation=implementation, activation="relu")
        by_call, _ = moe(
            x, routing, experts, implementation=implementation, activation=lambda h: h * (h > 0)
        )
        np.testing.assert_allclose(by_name, by_call, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(implementation="dense"), "implementation: got 'dense'; allowed: dropless, sorted"),
        (dict(capacity=0), "capacity: got 0; allowed: integers >= 1, or None"),
        (dict(capacity=float("nan")), "capacity: got nan; allowed: integers >= 1, or None"),
        (dict(capacity=True), "capacity: got True; allowed: integers >= 1, or None"),
        (dict(priority="random"), "priority: got 'random'"),
        (dict(backend="cuda"), "backend: got 'cuda'; allowed: xla_cpu"),
        (dict(position=jnp.ones((37, 2))), "position: got dtype float32; allowed: integers"),
        (dict(activation="gelo"), "activation: got 'gelo'"),
        (dict(activation="glu"), "activation: got 'glu'; allowed: an elementwise function"),
        (dict(activation="one_hot"), "activation: got 'one_hot'"),
        (dict(experts={"w_in": jnp.ones((5, 6, 10))}), r"experts: got \['w_in'\]; allowed: w_in"),
        (dict(w_out=jnp.ones((5, 10, 7))), r"experts.w_out: got shape \(5, 10, 7\)"),
        (dict(x=jnp.ones((37, 6), jnp.int32)), "x: got dtype int32; allowed: floating"),
        (
            dict(experts={"w_in": jnp.ones((4, 6, 10)), "w_out": jnp.ones((4, 10, 6))}),
            "experts: got 4; allowed: 5",
        ),
        (dict(x=jnp.ones((3, 6))), r"got x \(3, 6\), routing.expert \(37, 2\)"),
    ],
)
def test_bad_input(change, message):
    x, router, experts = make_case()
    arguments = dict(x=x, routing=softmax_top_k(x @ router, 2), experts=experts)
    if "w_out" in change:
        arguments["experts"] = experts | change
    else:
        arguments |= change
    with pytest.raises(ValueError, match=message):
        moe(**arguments)


def test_an_activation_may_learn_and_need_not_be_hashable():
    x, router, experts = make_case(num_tokens=10)
    routing = softmax_top_k(x @ router, 2)

    class Swish:
        __hash__ = None

        def __init__(self, slope):
            self.slope = slope

        def __call__(self, h):
            return h * jax.nn.sigmoid(self.slope * h)

    def loss(slope, implementation):
        how = dict(implementation=implementation, activation=Swish(slope))
        return jnp.sum(moe(x, routing, experts, **how)[0] ** 2)

    want, d_want = jax.value_and_grad(loss)(1.5, "einsum")
    got, d_got = jax.value_and_grad(loss)(1.5, "dropless")
    np.testing.assert_allclose([got, d_got], [want, d_want], rtol=1e-5)
    np.testing.assert_allclose(loss(1.5, "dropless"), want, rtol=1e-5)


def test_an_activation_may_depend_on_the_layer_of_a_scan():
    x, router, experts = make_case(num_tokens=6, num_experts=3)
    routing = softmax_top_k(x @ router, 2)

    def loss(x, implementation):
        def layer(x, n):
            def activation(h):
                return jnp.where(n > 0, h, jnp.tanh(h))

            how = dict(implementation=implementation, activation=activation)
            return moe(x, routing, experts, **how)[0], None

        return jnp.sum(jax.lax.scan(layer, x, jnp.arange(2))[0])

    got, want = jax.grad(loss)(x, "dropless"), jax.grad(loss)(x, "einsum")
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["dropless", "sorted"])
def test_nothing_of_another_expert_reaches_a_gradient(implementation):
    # Every expert is next to one with a NaN gate, and the derivative of the root is infinite at 0.
    x, _, experts = make_case(num_tokens=16, num_experts=4, bias=True)
    expert = jnp.arange(16)[:, None] % 4
    routing = softmax_top_k(4.0 * jax.nn.one_hot(expert[:, 0], 4), 1)
    gate = routing.gate.at[1, 0].set(jnp.nan)

    def loss(experts):
        how = dict(
            implementation=implementation, activation=lambda h: jnp.sign(h) * jnp.sqrt(jnp.abs(h))
        )
        y, _ = moe(x, routing._replace(gate=gate), experts, **how)
        return jnp.sum(y[2:] ** 2)

    for name, leaf in jax.grad(loss)(experts).items():
        others = leaf[np.array([0, 2, 3])]
        assert np.isfinite(others).all(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inside_shard_map_with_all_checks(implementation):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, all_devices = jax.P("data"), jax.P()
    x, router, experts = make_case(num_tokens=16)

    def one(x, router, experts):
        routing = softmax_top_k(x @ router, 2)
        return moe(x, routing, experts, implementation=implementation)[0]

    def loss(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=(0, 1, 2)))

    specs = (tokens, all_devices, all_devices)
    many = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=tokens)
    got, want = loss(many)(x, router, experts), loss(one)(x, router, experts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_in_float64():
    with jax.enable_x64(True):
        x, router, experts = jax.tree.map(lambda a: a.astype(jnp.float64), make_case(num_tokens=9))
        routing = softmax_top_k(x @ router, 2)

        def loss(experts, implementation):
            return jnp.sum(moe(x, routing, experts, implementation=implementation)[0] ** 2)

        got = jax.grad(loss)(experts, "dropless")
        want = jax.grad(loss)(experts, "einsum")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_integers_of_any_width_are_experts_and_positions():
    x, router, experts = make_case(num_tokens=300, num_experts=8)
    routing = softmax_top_k(x @ router, 2)
    want, _ = moe(x, routing, experts)
    narrow = routing._replace(expert=routing.expert.astype(jnp.uint8))
    place = positions(routing.expert, 8, priority="arrival").astype(jnp.int16)
    for implementation in ("dropless", "sorted"):
        y, _ = moe(x, narrow, experts, implementation=implementation, position=place)
        np.testing.assert_allclose(y, want, atol=1e-5)
