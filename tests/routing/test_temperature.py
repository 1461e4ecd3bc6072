"""Power iteration against numpy's norm, the schedule, and the gate's Lipschitz constant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.routing import (
    Observed,
    RouterInputs,
    make_router,
    power_iteration,
    scheduled_temperature,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

iterate = jax.jit(power_iteration, static_argnames="steps")
W = np.asarray(jax.random.normal(jax.random.key(0), (12, 5)))
V = np.asarray(jax.random.normal(jax.random.key(1), (12,)))


class TestPowerIteration:
    def test_converges_to_the_norm(self):
        sigma, v = iterate(W, V, steps=200)
        left, values, _ = np.linalg.svd(W)
        np.testing.assert_allclose(sigma, values[0], rtol=1e-5)
        np.testing.assert_allclose(abs(np.dot(left[:, 0], v)), 1.0, rtol=1e-5)

    def test_golden(self):
        # w w^T = [[2, 1], [1, 2]] has eigenvalues 3 and 1: the norm is 3^(1/2).
        w = jnp.array([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]])
        sigma, _ = iterate(w, jnp.array([1.0, 0.0]), steps=30)
        np.testing.assert_allclose(sigma, np.sqrt(3), rtol=1e-6)
        # One step from (1, 0): v = (2, 1)/5^(1/2), |w^T v|^2 = (4 + 1 + 9)/5.
        sigma, v = iterate(w, jnp.array([1.0, 0.0]), steps=1)
        np.testing.assert_allclose(v, np.array([2, 1]) / np.sqrt(5), rtol=1e-6)
        np.testing.assert_allclose(sigma, np.sqrt(14 / 5), rtol=1e-6)

    def test_is_a_rising_lower_bound(self):
        norm = np.linalg.norm(W, 2)
        v, before = V, 0.0
        for _ in range(15):
            sigma, v = iterate(W, v, steps=1)
            assert before * (1 - 1e-6) <= sigma <= norm * (1 + 1e-6)
            before = sigma

    def test_goes_on_where_it_was(self):
        v = V
        for _ in range(4):
            sigma, v = iterate(W, v, steps=1)
        together, v_together = iterate(W, V, steps=4)
        np.testing.assert_allclose(sigma, together, rtol=1e-6)
        np.testing.assert_allclose(v, v_together, atol=1e-6)

    @pytest.mark.parametrize("w", [np.zeros((12, 5)), np.outer(np.eye(12)[0], np.ones(5))])
    def test_nothing_to_follow_has_no_nan(self, w):
        # w = 0, and a v orthogonal to all columns.
        v = V * (np.arange(12) > 0)
        sigma, new = iterate(w, v, steps=3)
        assert sigma == 0
        np.testing.assert_allclose(new, v / np.linalg.norm(v), rtol=1e-5)

    @pytest.mark.parametrize(
        ("shapes", "steps", "message"),
        [
            (((12, 5), (5,)), 1, r"w, v: got shapes \(12, 5\), \(5,\); allowed: \[d, E\], \[d\]"),
            (((12, 5), (12,)), 0, "steps: got 0; allowed: 1 or more"),
        ],
    )
    def test_bad_arguments(self, shapes, steps, message):
        with pytest.raises(ValueError, match=message):
            power_iteration(jnp.zeros(shapes[0]), jnp.zeros(shapes[1]), steps=steps)


@pytest.mark.parametrize(("sigma", "expected"), [(8.0, 1.0), (1.0, 0.25), (0.0, 0.25)])
def test_scheduled_temperature(sigma, expected):
    # max(.25, sigma / 8)
    assert scheduled_temperature(jnp.float32(sigma), 4.0, 0.25) == expected


@pytest.mark.parametrize(("target", "minimum"), [(0.0, 0.25), (4.0, 0.0)])
def test_bad_schedule(target, minimum):
    with pytest.raises(ValueError, match="got 0.0; allowed: numbers > 0"):
        scheduled_temperature(jnp.float32(1.0), target, minimum)


def test_fixed_temperature_divides_the_logits():
    router = make_router("temperature_top_k", k=1, temperature=0.5)
    x = jnp.array([[1.0, 0.0, -1.0]])
    routed = jax.jit(router.route)(RouterInputs(x), {"kernel": jnp.eye(3)}, {})
    np.testing.assert_allclose(routed.logits, 2 * x, rtol=1e-6)
    np.testing.assert_allclose(routed.choice.probs, jax.nn.softmax(2 * x), rtol=1e-6)


class TestScheduledTopK:
    ROUTER = make_router("scheduled_top_k", k=2, target=0.5, minimum=0.25)

    @pytest.fixture
    def state(self):
        return jax.jit(self.ROUTER.state, static_argnums=2)(jax.random.key(2), {"kernel": W}, 5)

    def test_first_state_is_warm(self, state):
        # With target .5 the temperature is the norm.
        norm = np.linalg.norm(W, 2)
        np.testing.assert_allclose(state["sigma"], norm, rtol=0.02)
        np.testing.assert_allclose(state["temperature"], state["sigma"], rtol=1e-6)
        report = self.ROUTER.report({}, state)
        np.testing.assert_allclose(report["gate_lipschitz"], 0.5, rtol=1e-5)

    def test_temperature_divides_the_logits(self, state):
        x = jax.random.normal(jax.random.key(3), (4, 12))
        routed = jax.jit(self.ROUTER.route)(
            RouterInputs(x), {"kernel": W}, state | {"temperature": 2.0}
        )
        np.testing.assert_allclose(routed.logits, np.asarray(x) @ W / 2, atol=1e-5)

    def test_update_follows_the_kernels_of_all_layers(self, state):
        # Two layers, the second's kernel three times as large as the state knew.
        layers = jax.tree.map(lambda a: jnp.stack([a, a]), state)
        kernels = {"kernel": jnp.stack([W, 3 * W])}
        observed = Observed(jnp.zeros((2, 5), jnp.int32), jnp.int32(4), jnp.float32(0))
        new = jax.jit(self.ROUTER.update)(layers, kernels, observed)
        ratio = np.asarray(new["sigma"] / layers["sigma"])
        np.testing.assert_allclose(ratio, [1, 3], rtol=0.01)
        np.testing.assert_allclose(new["temperature"], new["sigma"], rtol=1e-6)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, layers)
        # One step of power iteration for each layer, from where it was.
        sigma, v = iterate(W, state["v"], steps=1)
        np.testing.assert_allclose(new["sigma"][0], sigma, rtol=1e-5)
        np.testing.assert_allclose(new["v"][0], v, atol=1e-5)

    def test_evaluation_changes_nothing(self, state):
        before = jax.tree.map(np.array, state)
        inputs = RouterInputs(jax.random.normal(jax.random.key(4), (4, 12)))
        route = jax.jit(self.ROUTER.route)
        first, second = (route(inputs, {"kernel": W}, state) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)
        jax.tree.map(np.testing.assert_array_equal, before, state)

    def test_lipschitz_constant_is_attained_at_one_half(self):
        # Kernel (v, -v) and x = 0: probs (1/2, 1/2), d probs / dx = (v, -v) / (2 tau), of norm
        # 2^(1/2) |v| / (2 tau), which is |kernel|_2 / (2 tau). Elsewhere it is less.
        kernel = jnp.stack([V, -V], axis=1)
        state = self.ROUTER.state(jax.random.key(5), {"kernel": kernel}, 2)
        np.testing.assert_allclose(state["sigma"], np.sqrt(2) * np.linalg.norm(V), rtol=1e-5)

        @jax.jit
        @jax.jacobian
        def jacobian(x):
            return self.ROUTER.route(RouterInputs(x[None]), {"kernel": kernel}, state).choice.probs

        def constant(x):
            return np.linalg.norm(jacobian(jnp.asarray(x, jnp.float32))[0], 2)

        bound = self.ROUTER.report({}, state)["gate_lipschitz"]
        np.testing.assert_allclose(constant(np.zeros(12)), bound, rtol=1e-5)
        assert constant(V) < bound
