"""Choices that say what the rows of every expert are, against loops; gradients against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.dispatch import moe
from moe_jax.routing import (
    ExpertChoice,
    expert_choice,
    merge_weights,
    soft_moe_weights,
    softmax_top_k,
)
from moe_jax.routing.types import SoftChoice, dense_gates

T, D, E, F, S, G = 12, 5, 4, 6, 2, 3


@pytest.fixture(scope="module", autouse=True)
def compile_once(quick_compilation):
    """For every test of this file."""


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def weights(glu=True, bias=True, seed=1):
    shapes = dict(w_in=(E, D, F), w_out=(E, F, D))
    shapes |= dict(w_gate=(E, D, F)) if glu else {}
    shapes |= dict(b_in=(E, F), b_out=(E, D)) if bias else {}
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def one_expert(x, experts, e=None):
    """activation(x w_gate) * (x w_in + b_in) @ w_out + b_out of expert e, or of plain weights."""
    w = {name: value if e is None else value[e] for name, value in experts.items()}
    hidden = x @ w["w_in"] + w.get("b_in", 0.0)
    if "w_gate" in w:
        hidden = jax.nn.gelu(x @ w["w_gate"]) * hidden
    else:
        hidden = jax.nn.gelu(hidden)
    return hidden @ w["w_out"] + w.get("b_out", 0.0)


def every_expert(x, experts):
    return jnp.stack([one_expert(x, experts, e) for e in range(E)], axis=1)  # [T, E, d]


def by_expert_choice(x, logits, experts, valid):
    gates = dense_gates(expert_choice(logits, 5, valid=valid))
    return jnp.einsum("te,ted->td", gates, every_expert(x, experts))


def by_slots(x, slots, experts, valid):
    parts = []
    for g in range(G):
        rows = slice(g * T // G, (g + 1) * T // G)
        choice = soft_moe_weights(x[rows], slots, valid=valid[rows])
        outputs = [
            one_expert(jnp.einsum("ts,td->sd", choice.dispatch[:, e], x[rows]), experts, e)
            for e in range(E)
        ]
        parts.append(jnp.einsum("tes,esd->td", choice.combine, jnp.stack(outputs)))
    return jnp.concatenate(parts)


def by_merging(x, logits, experts, valid):
    weight = merge_weights(logits, G, valid=valid).weight
    parts = []
    for g in range(G):
        rows = slice(g * T // G, (g + 1) * T // G)
        merged = {
            name: sum(weight[g, e] * value[e] for e in range(E)) for name, value in experts.items()
        }
        parts.append(one_expert(x[rows], merged))
    return jnp.where(valid[:, None], jnp.concatenate(parts), 0)


def soft_choice(x, slots, valid):
    sequences = jax.vmap(lambda x, valid: soft_moe_weights(x, slots, valid=valid))
    choice = sequences(x.reshape(G, -1, D), valid.reshape(G, -1))
    return SoftChoice(choice.dispatch, choice.combine, choice.probs.reshape(T, E))


CASES = {
    "expert choice": (
        lambda x, logits, valid: expert_choice(logits, 5, valid=valid),
        by_expert_choice,
        (T, E),
    ),
    "soft": (soft_choice, by_slots, (D, E, S)),
    "merged": (
        lambda x, logits, valid: merge_weights(logits, G, valid=valid),
        by_merging,
        (T, E),
    ),
}


@pytest.mark.parametrize("glu, bias", [(True, True), (False, False)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, glu, bias):
    choose, slow, shape = CASES[case]
    x, routed, experts, weight = (
        normal(T, D),
        normal(*shape, seed=7),
        weights(glu, bias),
        normal(T, D),
    )
    valid = jnp.arange(T) % 5 != 4

    def fast(x, routed, experts):
        y, dropped = moe(x, choose(x, routed, valid), experts)
        assert dropped.shape == (E,) and dropped.dtype == jnp.int32
        return jnp.sum(weight * y), y

    def reference(x, routed, experts):
        y = slow(x, routed, experts, valid)
        return jnp.sum(weight * y), y

    with_gradients = [
        jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(x, routed, experts)
        for f in (fast, reference)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *with_gradients)
    np.testing.assert_array_equal(with_gradients[0][1][~valid], 0)


@pytest.mark.parametrize("case", CASES)
def test_nan_at_invalid_places_stays_there(case):
    choose, _, shape = CASES[case]
    routed, experts = normal(*shape, seed=7), weights()
    valid = jnp.arange(T) % 5 != 4
    x = jnp.where(valid[:, None], normal(T, D), jnp.nan)
    clean = jnp.where(valid[:, None], x, 0.0)
    y, _ = moe(x, choose(clean, routed, valid), experts)
    expected, _ = moe(clean, choose(clean, routed, valid), experts)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case):
    choose, _, shape = CASES[case]
    x, routed = normal(T, D), normal(*shape, seed=7)
    valid = jnp.ones(T, bool)
    expected, _ = moe(x, choose(x, routed, valid), weights())
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights())
    y, _ = moe(x.astype(jnp.bfloat16), choose(x, routed, valid), low)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.1 * jnp.abs(expected).max())


def test_expert_choice_of_every_token_is_every_expert():
    """A capacity of T takes all tokens: the sum over all experts with the router probabilities."""
    x, logits, experts = normal(T, D), normal(T, E, seed=7), weights()
    y, _ = moe(x, expert_choice(logits, T), experts)
    routing = softmax_top_k(logits, E)
    expected, _ = moe(x, routing, experts, implementation="einsum")
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_one_sequence_needs_no_axis_for_it():
    x, slots, experts = normal(T, D), normal(D, E, S, seed=7), weights()
    choice = soft_moe_weights(x, slots)
    grouped = SoftChoice(choice.dispatch[None], choice.combine[None], choice.probs)
    np.testing.assert_array_equal(moe(x, choice, experts)[0], moe(x, grouped, experts)[0])


def test_nobody_taken_is_zero():
    empty = ExpertChoice(jnp.full((E, 2), T), jnp.zeros((E, 2)), jnp.zeros((T, E)))
    y, _ = moe(normal(T, D), empty, weights())
    np.testing.assert_array_equal(y, np.zeros((T, D)))


def test_what_does_not_fit_is_refused():
    x, choice = normal(T, D), expert_choice(normal(T, E), 3)
    with pytest.raises(ValueError, match="capacity: got 2; allowed: None with ExpertChoice"):
        moe(x, choice, weights(), capacity=2)
    with pytest.raises(ValueError, match=r"got x \(11, 5\), routing.probs \(12, 4\)"):
        moe(x[:-1], choice, weights())
    with pytest.raises(ValueError, match="experts: got 4; allowed: 3"):
        moe(x, expert_choice(normal(T, 3), 3), weights())
