"""The smooth top-k gate: golden numbers, a loop, gradients, and the router around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import (
    Observed,
    RouterInputs,
    annealed_target,
    dense_gates,
    make_router,
    smooth_top_k,
    top_k_softmax,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

choose = jax.jit(smooth_top_k, static_argnames=("k", "a", "b", "max_active"))
gates_of = jax.jit(dense_gates)

# With k = 2 and epsilon = 1: z_[k] = 1 and u = z, so experts 0 and 1 are whole, 2 and 3 fade at
# u = .7 and .2, expert 4 is out.
Z = np.array([[2.0, 1.0, 0.7, 0.2, -1.0]], np.float32)
GOLDEN_GATES = {
    (1, 50): [0.553802363, 0.203732504, 0.150928751, 0.091536383, 0],
    (2, 2): [0.621950390, 0.228802762, 0.143199336, 0.006047512, 0],
    (1, 1): [0.628254565, 0.231121938, 0.119853540, 0.020769956, 0],
}
GOLDEN_EPSILON_GRADIENTS = {(1, 50): 0.00078296, (2, 2): 0.23351071, (1, 1): 0.28029289}
SHAPES = sorted(GOLDEN_GATES)


def slow_gates(logits, k, epsilon, a, b, max_active=None):
    """f64[T, E], token by token as the formula is written."""
    logits = np.asarray(logits, np.float64)
    gates = np.zeros_like(logits)
    for t, z in enumerate(logits):
        order = np.argsort(-z, kind="stable")
        kth = z[order[k - 1]]
        for e in order[:max_active]:
            u = 1 + (z[e] - kth) / epsilon
            if u >= 1:
                p = 1.0
            elif u > 0:
                p = u**a / (u**a + (1 - u) ** b)
            else:
                p = 0.0
            gates[t, e] = p * np.exp(z[e] - z.max())
    return gates / gates.sum(axis=1, keepdims=True)


@functools.partial(jax.jit, static_argnames=("stop", "a", "b"))
def weighted_sum(z, epsilon, a, b, stop=False):
    """G . [0, 1, 2, ...] and with it its gradients in z and epsilon."""

    def f(z, epsilon):
        routing = smooth_top_k(z, 2, epsilon, a=a, b=b, stop_margin_gradient=stop)
        return jnp.sum(dense_gates(routing) * jnp.arange(z.shape[1]))

    return jax.value_and_grad(f, argnums=(0, 1))(z, epsilon)


class TestGolden:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_gates(self, shape):
        a, b = shape
        gates = gates_of(choose(Z, 2, 1.0, a=a, b=b))
        np.testing.assert_allclose(gates, [GOLDEN_GATES[shape]], atol=1e-6)
        np.testing.assert_allclose(gates, slow_gates(Z, 2, 1.0, a, b), atol=1e-6)

    @pytest.mark.parametrize("stop", [False, True])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_gradient_of_epsilon(self, shape, stop):
        # The same whether or not the logits get a gradient through the margin.
        _, (_, gradient) = weighted_sum(Z, 1.0, *shape, stop=stop)
        np.testing.assert_allclose(gradient, GOLDEN_EPSILON_GRADIENTS[shape], atol=1e-6)

    def test_gradient_of_the_logits(self):
        _, (gradient, _) = weighted_sum(Z, 1.0, 2, 2)
        expected = [[-0.33171349, -0.37910403, 0.52040472, 0.19041281, 0]]
        np.testing.assert_allclose(gradient, expected, atol=2e-6)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_stop_margin_gradient_leaves_the_logits_the_softmax_alone(self, shape):
        # With h constant: d sum_i g_i i / dz_j = g_j (j - sum_i g_i i).
        gate = np.array(GOLDEN_GATES[shape])
        index = np.arange(5)
        _, (gradient, _) = weighted_sum(Z, 1.0, *shape, stop=True)
        np.testing.assert_allclose(gradient[0], gate * (index - gate @ index), atol=2e-6)

    @pytest.mark.parametrize(
        ("a", "b", "expected"),
        [
            # p(.1) = .1 / (.1 + .9^50) = .1 / (.1 + .00515378)
            (1, 50, 0.950988206),
            # .01 / (.01 + .81) and .001 / (.001 + .81)
            (2, 2, 0.012195122),
            (3, 2, 0.00123304562),
        ],
    )
    def test_weight_in_the_margin(self, a, b, expected):
        # k = 1 with logits (0, -.9) and epsilon = 1 has u = .1: the gates have ratio p e^-.9.
        gate = gates_of(choose(jnp.array([[0.0, -0.9]]), 1, 1.0, a=a, b=b))[0]
        np.testing.assert_allclose(gate[1] / gate[0] * np.exp(0.9), expected, rtol=1e-5)


@pytest.mark.parametrize(("a", "b"), [(1, 50), (2, 2), (3, 2), (0.5, 0.5)])
def test_matches_the_loop(a, b):
    logits = jax.random.normal(jax.random.key(0), (40, 8))
    routing = choose(logits, 3, 0.7, a=a, b=b)
    np.testing.assert_allclose(gates_of(routing), slow_gates(logits, 3, 0.7, a, b), atol=1e-5)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 2), (3, 2)])
def test_gradients_against_finite_differences(a, b):
    # Logits .3 apart in an order of their own: u = .7, .4, .1, far from both ends of the margin.
    logits = 0.3 * jax.random.permutation(
        jax.random.key(1), jnp.tile(jnp.arange(6.0), (4, 1)), axis=1, independent=True
    )
    weight = jax.random.normal(jax.random.key(2), (4, 6))

    @jax.jit
    def f(z, epsilon):
        return jnp.sum(dense_gates(smooth_top_k(z, 2, epsilon, a=a, b=b)) * weight)

    check_grads(f, (logits, jnp.float32(1.0)), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


@pytest.mark.parametrize("stop", [False, True])
def test_steep_fading_has_no_nan(stop):
    # u^200 underflows and the logarithms of u = 0 and 1 - u = 0 are infinite.
    z = jnp.concatenate([jnp.ones((1, 2)), jnp.linspace(-0.1, 1.1, 25)[None]], axis=1)
    value, gradients = weighted_sum(z, 1.0, 200, 200, stop=stop)
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("epsilon", [0.0, 1e-38])
def test_a_margin_that_underflows_is_hard_top_k(epsilon):
    logits = jax.random.normal(jax.random.key(3), (6, 5))
    # A number known before tracing is refused; a learned one is not seen.
    gates = jax.jit(lambda epsilon: dense_gates(smooth_top_k(logits, 2, epsilon)))(epsilon)
    np.testing.assert_allclose(gates, dense_gates(top_k_softmax(logits, 2)), atol=1e-6)


class TestActiveExperts:
    def test_the_k_best_are_always_active(self):
        logits = jax.random.normal(jax.random.key(4), (50, 6))
        for epsilon in (1e-6, 0.5, 10.0):
            routing = choose(logits, 2, epsilon)
            np.testing.assert_array_equal(routing.expert[:, :2], top_k_softmax(logits, 2).expert)
            assert (np.asarray(routing.gate[:, :2]) > 0).all()

    def test_experts_outside_take_no_slot(self):
        np.testing.assert_array_equal(choose(Z, 2, 1.0).expert, [[0, 1, 2, 3, 5]])

    def test_the_edge_of_the_margin_is_outside(self):
        # u = 0 exactly.
        routing = choose(jnp.array([[1.0, 0.0]]), 1, 1.0)
        np.testing.assert_array_equal(routing.expert, [[0, 2]])
        np.testing.assert_array_equal(routing.gate, [[1, 0]])

    def test_max_active_cuts_the_lowest(self):
        # The golden gates of (2, 2) without the fourth: over .621950 + .228803 + .143199.
        routing = choose(Z, 2, 1.0, max_active=3)
        kept = np.array(GOLDEN_GATES[2, 2][:3])
        np.testing.assert_array_equal(routing.expert, [[0, 1, 2]])
        np.testing.assert_allclose(routing.gate, [kept / kept.sum()], atol=1e-6)

    def test_max_active_matches_the_loop(self):
        logits = jax.random.normal(jax.random.key(5), (30, 8))
        routing = choose(logits, 2, 1.5, max_active=4)
        expected = slow_gates(logits, 2, 1.5, 2, 2, max_active=4)
        np.testing.assert_allclose(gates_of(routing), expected, atol=1e-5)
        # The cut is felt somewhere.
        assert (np.count_nonzero(slow_gates(logits, 2, 1.5, 2, 2), axis=1) > 4).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(epsilon=0.0), "epsilon: got 0.0; allowed: numbers > 0"),
        (dict(epsilon=float("nan")), "epsilon: got nan"),
        (dict(epsilon=1.0, a=0.0), r"a: got 0.0; allowed: numbers > 0"),
        (dict(epsilon=1.0, max_active=1), r"max_active: got 1; allowed: 2\.\.5"),
        (dict(epsilon=1.0, max_active=6), r"max_active: got 6; allowed: 1\.\.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        smooth_top_k(Z, 2, **arguments)


@pytest.mark.parametrize(
    ("progress", "expected"), [(0, 2.5), (0.5, 2.5), (0.625, 2.25), (0.75, 2.0), (1, 2.0)]
)
def test_annealed_target(progress, expected):
    np.testing.assert_allclose(annealed_target(jnp.float32(progress), 2, 0.5), expected, rtol=1e-6)


class TestRouter:
    """SmoothTopK, with the identity as its kernel so that tokens are logits."""

    X = np.array([[2.0, 1.0, 0.7, 0.2, -1.0], [0.0, -0.5, -2.0, -3.0, -4.0]], np.float32)

    def router_of(self, eta=None, **arguments):
        router = make_router("smooth_top_k", k=2, **arguments)
        # softplus(eta) = 1.
        eta = np.log(np.e - 1) if eta is None else eta
        weights = {"kernel": jnp.eye(5), "eta": jnp.float32(eta)}
        return router, jax.jit(router.route), weights, router.state(None, weights, 5)

    def test_first_margin(self):
        # softplus(-9) = log(1 + e^-9) = log(1 + 1.2341e-4) = 1.2340e-4.
        router, _, _, state = self.router_of()
        eta = router.weights(5, 5)["eta"]
        first = eta.init(jax.random.key(0), eta.shape, jnp.float32)
        report = router.report({"eta": first}, state)
        np.testing.assert_allclose(report["epsilon"], 1.2340e-4, rtol=1e-4)
        assert report["active_target"] == 2.5

    def test_gate_follows_eta(self):
        _, route, weights, state = self.router_of()
        routed = route(RouterInputs(jnp.asarray(self.X)), weights, state)
        expected = slow_gates(self.X, 2, 1.0, 2, 2)
        np.testing.assert_allclose(gates_of(routed.choice), expected, atol=1e-6)

    @pytest.mark.parametrize("eta", [np.log(np.e - 1), -9.0])
    def test_boundary_loss_and_its_gradient(self, eta):
        # With epsilon = 1 the tokens have 4 and 2 active experts, A = 3; with 1.234e-4, A = 2.
        _, route, weights, state = self.router_of(eta, boundary_weight=10.0)
        inputs = RouterInputs(jnp.asarray(self.X))

        @jax.value_and_grad
        def loss(weights):
            return route(inputs, weights, state).losses["boundary"]

        value, gradient = loss(weights)
        excess = (3.0 if eta > 0 else 2.0) - 2.5
        np.testing.assert_allclose(value, 10 * np.log1p(np.exp(eta)) * excess, rtol=1e-5)
        slope = 10 / (1 + np.exp(-eta)) * excess
        np.testing.assert_allclose(gradient["eta"], slope, rtol=1e-5)
        np.testing.assert_array_equal(gradient["kernel"], 0)

    def test_invalid_tokens_do_not_count_as_active(self):
        _, route, weights, state = self.router_of()
        inputs = RouterInputs(jnp.asarray(self.X), valid=jnp.array([True, False]))
        loss = route(inputs, weights, state).losses["boundary"]
        np.testing.assert_allclose(loss, 4 - 2.5, rtol=1e-5)

    def test_annealed_evaluation_is_hard(self):
        _, route, weights, state = self.router_of(anneal=True)
        x = jnp.asarray(self.X)
        hard = route(RouterInputs(x), weights, state).choice
        np.testing.assert_array_equal(dense_gates(hard), dense_gates(top_k_softmax(x, 2)))
        soft = route(RouterInputs(x, key=jax.random.key(0)), weights, state).choice
        np.testing.assert_allclose(dense_gates(soft), slow_gates(x, 2, 1.0, 2, 2), atol=1e-6)

    @pytest.mark.parametrize(("anneal", "expected"), [(True, 2.25), (False, 2.5)])
    def test_update_moves_the_target_only_if_annealed(self, anneal, expected):
        router, _, _, _ = self.router_of(anneal=anneal)
        observed = Observed(jnp.zeros((3, 5), jnp.int32), jnp.int32(2), jnp.float32(0.625))
        state = router.update({"target": jnp.full(3, 2.5)}, {}, observed)
        np.testing.assert_allclose(state["target"], [expected] * 3, rtol=1e-6)
        assert state["target"].dtype == jnp.float32

    def test_noise_of_training(self):
        _, route, weights, state = self.router_of(noise=0.5)
        x, key = jnp.asarray(self.X), jax.random.key(6)
        noisy = route(RouterInputs(x, key=key), weights, state).logits
        np.testing.assert_allclose(noisy, x + 0.5 * jax.random.normal(key, x.shape) / 5, rtol=1e-6)
        np.testing.assert_array_equal(route(RouterInputs(x), weights, state).logits, x)


@pytest.mark.parametrize("eta", [-9.0, -45.0, -100.0])
@pytest.mark.parametrize("stop_margin_gradient", [False, True])
def test_a_margin_that_vanishes_has_no_nan(eta, stop_margin_gradient):
    logits = jnp.array([[2.0, 1.0, 0.7, 0.2, -1.0], [1.0, 1.0, 1.0, 0.0, -1e4]])

    def loss(eta, logits):
        epsilon = jax.nn.softplus(eta)
        routing = smooth_top_k(logits, 2, epsilon, stop_margin_gradient=stop_margin_gradient)
        return jnp.sum(dense_gates(routing) * jnp.arange(5.0))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(eta, logits)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
