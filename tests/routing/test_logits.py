"""Linear and cosine logits: float32 whatever the tokens are, and directions only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import RouterInputs, cosine_logits, linear_logits, make_router

pytestmark = pytest.mark.usefixtures("quick_compilation")

cosine = jax.jit(cosine_logits)
X = np.asarray(jax.random.normal(jax.random.key(0), (6, 8)))
PROJECTION = np.asarray(jax.random.normal(jax.random.key(1), (8, 4)))
EXPERTS = np.asarray(jax.random.normal(jax.random.key(2), (4, 5)))


def slow_cosine(x, scale):
    """f64[T, E], pair by pair."""
    logits = np.zeros((len(x), 5))
    for t, token in enumerate(np.asarray(x, np.float64)):
        u = token @ PROJECTION
        for e, v in enumerate(np.asarray(EXPERTS.T, np.float64)):
            logits[t, e] = scale * (u @ v) / (np.linalg.norm(u) * np.linalg.norm(v))
    return logits


class TestLinear:
    def test_float32_from_the_product_on(self):
        # A product in bfloat16 would be off by 2^-9 of a logit.
        x = jax.random.normal(jax.random.key(3), (64, 256)).astype(jnp.bfloat16)
        w = jax.random.normal(jax.random.key(4), (256, 16)) / 16
        logits = linear_logits(x, w)
        expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected, atol=2e-6)

    def test_leading_axes(self):
        logits = linear_logits(jnp.asarray(X).reshape(2, 3, 8), jnp.asarray(PROJECTION))
        np.testing.assert_allclose(logits.reshape(6, 4), X @ PROJECTION, atol=1e-5)


class TestCosine:
    def test_matches_the_loop(self):
        logits = cosine(X, PROJECTION, EXPERTS, 3.0)
        np.testing.assert_allclose(logits, slow_cosine(X, 3.0), atol=1e-5)

    def test_bounded_by_the_scale(self):
        # The bound is reached by an expert that is the token's own direction.
        aligned = jnp.asarray(X[:5] @ PROJECTION).T
        logits = np.asarray(cosine(X[:5], PROJECTION, aligned, 3.0))
        np.testing.assert_allclose(np.diag(logits), 3.0, rtol=1e-5)
        assert np.abs(logits).max() <= 3.0 * (1 + 1e-6)

    @pytest.mark.parametrize("norm", [1e-6, 1e6])
    def test_norms_do_not_matter(self, norm):
        expected = cosine(X, PROJECTION, EXPERTS, 3.0)
        np.testing.assert_allclose(
            cosine(norm * X, PROJECTION, EXPERTS, 3.0), expected, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            cosine(X, PROJECTION, norm * EXPERTS, 3.0), expected, rtol=1e-4, atol=1e-5
        )

    def test_a_zero_token_has_zero_logits_and_gradient(self):
        x = jnp.asarray(X).at[2].set(0.0)
        np.testing.assert_array_equal(cosine(x, PROJECTION, EXPERTS, 3.0)[2], 0)
        gradients = jax.grad(lambda *a: jnp.sum(cosine(*a, 3.0) ** 2), (0, 1, 2))(
            x, PROJECTION, EXPERTS
        )
        np.testing.assert_array_equal(gradients[0][2], 0)
        assert all(np.isfinite(gradient).all() for gradient in gradients)

    def test_gradients_against_finite_differences(self):
        weight = jax.random.normal(jax.random.key(5), (6, 5))
        f = jax.jit(lambda *arguments: jnp.sum(cosine_logits(*arguments) * weight))
        arguments = (X, PROJECTION, EXPERTS, jnp.float32(3.0))
        check_grads(f, arguments, order=1, atol=5e-2, rtol=2e-2, eps=1e-2)

    def test_float32_from_the_product_on(self):
        x = jnp.asarray(X).astype(jnp.bfloat16)
        logits = cosine(x, PROJECTION, EXPERTS, 3.0)
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, slow_cosine(np.asarray(x, np.float64), 3.0), atol=1e-5)


class TestCosineTopK:
    ROUTER = make_router("cosine_top_k", k=2, projection_width=4)

    def weights(self, log_scale):
        return {
            "projection": PROJECTION,
            "expert_embedding": EXPERTS,
            "log_scale": jnp.float32(log_scale),
        }

    def test_learns_the_logarithm_of_the_scale(self):
        routed = self.ROUTER.route(RouterInputs(jnp.asarray(X)), self.weights(np.log(3.0)), {})
        np.testing.assert_allclose(routed.logits, slow_cosine(X, 3.0), atol=1e-5)
        best = np.argsort(-slow_cosine(X, 3.0), axis=1)[:, :2]
        np.testing.assert_array_equal(routed.choice.expert, best)

    @pytest.mark.parametrize(("log_scale", "expected"), [(np.log(50), 50), (9.0, 100)])
    def test_scale_has_a_bound(self, log_scale, expected):
        scale = self.ROUTER.report(self.weights(log_scale), {})["scale"]
        np.testing.assert_allclose(scale, expected, rtol=1e-5)

    def test_first_weights(self):
        weights = self.ROUTER.weights(8, 5)
        first = {
            name: weight.init(jax.random.key(6), weight.shape, jnp.float32)
            for name, weight in weights.items()
        }
        assert {name: a.shape for name, a in first.items()} == {
            "projection": (8, 4),
            "expert_embedding": (4, 5),
            "log_scale": (),
        }
        np.testing.assert_allclose(self.ROUTER.report(first, {})["scale"], 2.0, rtol=1e-6)

    def test_masked_experts(self):
        mask = jnp.array([True, False, True, True, False])
        inputs = RouterInputs(jnp.asarray(X), expert_mask=mask)
        routed = self.ROUTER.route(inputs, self.weights(1.0), {})
        np.testing.assert_array_equal(routed.logits[:, [1, 4]], -np.inf)
        assert not np.isin(routed.choice.expert, [1, 4]).any()
