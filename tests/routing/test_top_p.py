"""Top-p routing: cases by hand, a loop, gradients, the entropy loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.routing import RouterInputs, dense_gates, entropy_loss, make_router, top_p

pytestmark = pytest.mark.usefixtures("quick_compilation")

choose = jax.jit(top_p, static_argnames=("mass", "max_active", "renormalize"))
gates_of = jax.jit(dense_gates)

PROBS = np.array([[0.6, 0.3, 0.1], [0.25, 0.35, 0.4]])


def logits_of(probs):
    return jnp.asarray(np.log(probs), jnp.float32)


def slow_gates(logits, mass, max_active=None, renormalize=False):
    """f64[T, E], token by token; and the number of experts of each."""
    logits = np.asarray(logits, np.float64)
    gates = np.zeros_like(logits)
    for t, row in enumerate(logits):
        probs = np.exp(row - row.max())
        probs /= probs.sum()
        total = 0.0
        for e in np.argsort(-row, kind="stable")[:max_active]:
            if total >= mass:
                break
            gates[t, e] = probs[e]
            total += probs[e]
        if renormalize:
            gates[t] /= gates[t].sum()
    return gates


def test_stops_when_the_mass_is_reached():
    # .6 >= .5 is enough alone; .4 is not, .4 + .35 is.
    routing = choose(logits_of(PROBS), 0.5)
    np.testing.assert_array_equal(routing.expert, [[0, 3, 3], [2, 1, 3]])
    np.testing.assert_allclose(routing.gate, [[0.6, 0, 0], [0.4, 0.35, 0]], rtol=1e-6)


def test_renormalised():
    routing = choose(logits_of(PROBS), 0.5, renormalize=True)
    np.testing.assert_allclose(routing.gate, [[1, 0, 0], [0.4 / 0.75, 0.35 / 0.75, 0]], rtol=1e-6)


def test_max_active_ends_it_earlier():
    routing = choose(logits_of(PROBS), 0.9, max_active=1)
    np.testing.assert_array_equal(routing.expert, [[0], [2]])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("mass", "max_active"), [(0.1, None), (0.5, None), (0.9, 4)])
def test_matches_the_loop(mass, max_active, renormalize):
    logits = 1.5 * jax.random.normal(jax.random.key(0), (60, 8))
    arguments = dict(max_active=max_active, renormalize=renormalize)
    gates = gates_of(choose(logits, mass, **arguments))
    np.testing.assert_allclose(gates, slow_gates(logits, mass, **arguments), atol=1e-6)


def test_the_whole_mass_takes_all_experts():
    logits = jax.random.normal(jax.random.key(1), (500, 16))
    assert (np.asarray(choose(logits, 1.0).expert) < 16).all()


@pytest.mark.parametrize("mass", [0.0, 1.1, float("nan")])
def test_bad_mass(mass):
    with pytest.raises(ValueError, match="mass: got .*; allowed: 0 < number <= 1"):
        top_p(jnp.zeros((2, 3)), mass)


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_against_finite_differences(renormalize):
    # Sums of probabilities (.6, .9, 1) and the like stay clear of .5.
    logits = logits_of(PROBS)
    weight = jax.random.normal(jax.random.key(2), logits.shape)

    @jax.jit
    def f(z):
        return jnp.sum(dense_gates(top_p(z, 0.5, renormalize=renormalize)) * weight)

    check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)


class TestEntropyLoss:
    def test_golden(self):
        # ln 4 for the even row, 0 for the certain one: mean .693147.
        probs = jnp.array([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
        valid = jnp.array([True, True, False])
        np.testing.assert_allclose(entropy_loss(probs, valid=valid), np.log(4) / 2, rtol=1e-6)
        assert entropy_loss(probs, valid=jnp.zeros(3, bool)) == 0

    def test_gradients(self):
        logits = jax.random.normal(jax.random.key(3), (5, 4))
        f = jax.jit(lambda z: entropy_loss(top_p(z, 0.5).probs))
        check_grads(f, (logits,), order=1, atol=1e-2, rtol=1e-2, eps=1e-2)
        # A probability of 0, by underflow or by a mask, has no NaN.
        gradient = jax.jit(jax.grad(f))(jnp.array([[0.0, -300.0, -jnp.inf, 1.0]]))
        assert np.isfinite(gradient).all()

    def test_of_the_router(self):
        router = make_router("top_p", k=2, mass=0.5, entropy_weight=0.01)
        inputs = RouterInputs(logits_of(PROBS), valid=jnp.array([True, False]))
        routed = jax.jit(router.route)(inputs, {"kernel": jnp.eye(3)}, {})
        # -.6 ln .6 - .3 ln .3 - .1 ln .1 = .306495 + .361192 + .230259 = .897946.
        np.testing.assert_allclose(routed.losses["entropy"], 0.00897946, rtol=1e-5)
        np.testing.assert_array_equal(routed.choice.expert, [[0, 3, 3], [3, 3, 3]])
