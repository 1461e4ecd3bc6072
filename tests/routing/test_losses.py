"""Auxiliary losses: golden numbers with their arithmetic, gradients, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from moe_jax.routing import TokenChoice, load_balance_loss, softmax_top_k, top_k_softmax, z_loss


def routing_of(probs, k, valid=None):
    return softmax_top_k(jnp.log(jnp.asarray(probs)), k, valid=valid)


def test_padding_is_not_counted():
    # Row i has p = .7 on expert i: P = (.25,)*4, f = (1/4,)*4, so 4 * 4 * (1/16) = 1.
    rows = np.full((4, 4), 0.1) + 0.6 * np.eye(4)
    pads = np.tile([0.97, 0.01, 0.01, 0.01], (4, 1))
    valid = np.array([True] * 4 + [False] * 4)
    probs = np.concatenate([rows, pads])
    counted = load_balance_loss(routing_of(probs, 1))
    np.testing.assert_allclose(counted, 1.72, atol=1e-5)
    np.testing.assert_allclose(load_balance_loss(routing_of(probs, 1, valid)), 1.0, atol=1e-5)
    masked_later = load_balance_loss(routing_of(probs, 1), valid=valid)
    np.testing.assert_allclose(masked_later, 1.0, atol=1e-5)


def test_layers_are_averaged_not_joined():
    # Layer 0 sends all to expert 0, layer 1 all to expert 1: each has loss E = 2.
    one_hot = np.stack([np.tile([1.0, 0.0], (4, 1)), np.tile([0.0, 1.0], (4, 1))])
    layers = jax.vmap(lambda p: routing_of(p, 1))(jnp.asarray(one_hot))
    np.testing.assert_allclose(jnp.mean(jax.vmap(load_balance_loss)(layers)), 2.0, rtol=1e-6)


def test_both_conventions_of_f():
    # k = 2 takes experts 0 and 1: f = (1/2, 1/2, 0, 0), 4 (.5*.5 + .5*.3) = 1.6; per token, f = 1
    # for both and 3.2.
    routing = routing_of(np.tile([0.5, 0.3, 0.15, 0.05], (6, 1)), 2)
    np.testing.assert_allclose(load_balance_loss(routing), 1.6, rtol=1e-6)
    np.testing.assert_allclose(load_balance_loss(routing, per="token"), 3.2, rtol=1e-6)
    with pytest.raises(ValueError, match="per: got 'batch'; allowed"):
        load_balance_loss(routing, per="batch")


@pytest.mark.parametrize("k", [1, 2, 8])
def test_perfect_balance_is_one(k):
    logits = jnp.stack([jnp.roll(jnp.arange(8.0), i) for i in range(8)])
    np.testing.assert_allclose(load_balance_loss(top_k_softmax(logits, k)), 1.0, rtol=1e-6)


def test_gradient_flows_through_the_probabilities_only():
    # d/dz of E sum f_i P_i with f fixed: E/T p_j (f_j - sum_i f_i p_i).
    logits = jax.random.normal(jax.random.key(0), (12, 4))
    routing = softmax_top_k(logits, 2)
    fraction = np.bincount(np.ravel(routing.expert), minlength=4) / 24
    inner = np.sum(fraction * routing.probs, axis=1, keepdims=True)
    expected = 4 / 12 * routing.probs * (fraction - inner)
    gradient = jax.grad(lambda z: load_balance_loss(softmax_top_k(z, 2)))(logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_two_shards_give_the_global_loss_and_gradient():
    # p = (.9,.1) on one half, (.1,.9) on the other: f = P = (1/2,1/2): 1. Each half alone has
    # 2 * .9 = 1.8, which is what a mean of local losses would give.
    logits = jnp.log(jnp.repeat(jnp.array([[0.9, 0.1], [0.1, 0.9]]), 4, axis=0))

    def loss(z):
        return load_balance_loss(softmax_top_k(z, 1))

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data")))
    value, gradient = jax.jit(jax.value_and_grad(loss))(sharded)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_allclose(jnp.mean(jnp.stack([loss(logits[:4]), loss(logits[4:])])), 1.8)
    np.testing.assert_allclose(gradient, jax.grad(loss)(logits), atol=1e-7)


@pytest.mark.parametrize("num_experts", [1, 4])
def test_no_nan_at_balance_one_expert_or_zero_router(num_experts):
    logits = jnp.zeros((8, num_experts))
    gradient = jax.grad(lambda z: load_balance_loss(softmax_top_k(z, 1)) + z_loss(z))(logits)
    assert np.isfinite(gradient).all()


def test_no_valid_token_is_zero_with_zero_gradient():
    valid = jnp.zeros(5, bool)

    def loss(z):
        return load_balance_loss(softmax_top_k(z, 2, valid=valid), valid=valid) + z_loss(
            z, valid=valid
        )

    value, gradient = jax.value_and_grad(loss)(jax.random.normal(jax.random.key(0), (5, 4)))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_wrong_shapes_are_refused():
    routing = routing_of(np.full((3, 4), 0.25), 1)
    one = jnp.array([True])
    for loss in (
        lambda: load_balance_loss(routing, valid=one),
        lambda: z_loss(jnp.ones((3, 4)), valid=one),
    ):
        with pytest.raises(ValueError, match=r"valid: got shape \(1,\); allowed: \(3,\)"):
            loss()
    with pytest.raises(ValueError, match=r"logits: got shape \(4,\); allowed: \[T, E\]"):
        z_loss(jnp.ones(4))


def test_z_loss_golden():
    # logsumexp(0,0) = log 2, logsumexp(log 3, 0) = log 4; mean of squares (.480453 + 1.921812)/2.
    logits = jnp.array([[0.0, 0.0], [np.log(3.0), 0.0], [50.0, 50.0]])
    valid = jnp.array([True, True, False])
    np.testing.assert_allclose(z_loss(logits, valid=valid), 1.2011325, rtol=1e-6)


def test_z_loss_gradients_and_infinite_rows():
    logits = jax.random.normal(jax.random.key(1), (5, 4))
    check_grads(z_loss, (logits,), order=2, atol=2e-2, rtol=2e-2)
    logits = logits.at[0].set(-jnp.inf).at[1, 2].set(-jnp.inf)
    value, gradient = jax.value_and_grad(z_loss)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_large_counts_are_exact():
    # A running count in bfloat16 sticks at 256.
    probs = jnp.tile(jnp.array([[0.75, 0.25]]), (40_840, 1))
    routing = TokenChoice(jnp.zeros((40_840, 1), jnp.int32), probs[:, :1], jnp.log(probs), probs)
    np.testing.assert_allclose(load_balance_loss(routing), 2 * 0.75, rtol=1e-5)
