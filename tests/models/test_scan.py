"""Remat and scanned layers give the numbers of the plain model, after converting parameters."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import Mlp, MoE
from moe_jax.models import LanguageModel, stack_layers, unstack_layers
from moe_jax.routing import make_router

V = 11
TOKENS = np.random.default_rng(0).integers(0, V, size=(2, 8)).astype(np.int32)


def moe():
    method = make_router("softmax_top_k", k=2)
    return MoE(4, 6, method, implementation="sorted", capacity_factor=1.0)


def model(**fields):
    defaults = dict(vocab_size=V, width=8, num_layers=4, num_heads=2, dense=lambda: Mlp(12))
    return LanguageModel(**(defaults | fields))


def loss_info_gradients(model, params):
    """Cross entropy of the next token, the logits and routing on the way, and every gradient."""

    def loss(params):
        logits, info = model.apply({"params": params}, TOKENS)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], axis=-1)
        return -jnp.mean(picked), (logits, info)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


STACKS = {
    "dense": dict(num_layers=2),
    "experts": dict(num_layers=2, moe=moe),
    "every second": dict(num_layers=4, moe=moe, moe_every=2),
}


@pytest.fixture(scope="module")
def plain(random_params):
    """plain(stack): parameters and results without remat and scan, computed once."""

    @functools.cache
    def results(stack):
        lm = model(**STACKS[stack])
        params = random_params(lm, TOKENS)["params"]
        return params, *loss_info_gradients(lm, params)

    return results


@pytest.mark.parametrize(
    "stack, remat, scan_layers",
    [
        ("dense", True, True),
        ("experts", True, False),
        ("every second", False, True),
        ("every second", True, True),
    ],
)
def test_remat_and_scan_change_no_number(plain, stack, remat, scan_layers):
    params, (loss, (logits, info)), gradients = plain(stack)
    other = model(**STACKS[stack], remat=remat, scan_layers=scan_layers)
    other_params = stack_layers(params) if scan_layers else params
    (got_loss, (got_logits, got_info)), got_gradients = loss_info_gradients(other, other_params)
    if scan_layers:
        got_gradients = unstack_layers(got_gradients)

    def close(got, want):
        np.testing.assert_allclose(got, want, atol=1e-5)

    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(got_logits, logits, atol=2e-5)
    jax.tree.map(close, got_gradients, gradients)
    jax.tree.map(close, got_info, info)
    if info is not None:
        np.testing.assert_array_equal(got_info.routing.expert, info.routing.expert)
        np.testing.assert_array_equal(got_info.dropped, info.dropped)
        assert info.dropped.sum() > 0


@pytest.mark.parametrize("fields", STACKS.values(), ids=STACKS.keys())
def test_stacked_shapes_are_those_of_the_scanned_model(random_params, fields):
    stacked = stack_layers(random_params(model(**fields), TOKENS)["params"])
    scanned = model(**fields, scan_layers=True)
    expected = jax.eval_shape(scanned.init, jax.random.key(0), TOKENS)["params"]
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, expected)


@pytest.mark.parametrize("num_layers, moe_every", [(1, 1), (4, 1), (4, 2), (12, 2), (3, 3)])
def test_unstacking_inverts_stacking(random_params, num_layers, moe_every):
    lm = model(num_layers=num_layers, moe=moe, moe_every=moe_every)
    params = random_params(lm, TOKENS)["params"]
    stacked = stack_layers(params)
    group = stacked["scanned_blocks"]
    assert len(group) == moe_every
    assert {leaf.shape[0] for leaf in jax.tree.leaves(group)} == {num_layers // moe_every}
    back = unstack_layers(stacked)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert "scanned_blocks" not in back and "blocks" not in stacked
    # block_i of group g is layer g * moe_every + i.
    last_norm = params["blocks"][f"block_{num_layers - 1}"]["feed_forward_norm"]["scale"]
    scale = group[f"block_{moe_every - 1}"]["feed_forward_norm"]["scale"][-1]
    np.testing.assert_array_equal(scale, last_norm)


def test_scanned_layers_start_out_different():
    params = model(num_layers=3, scan_layers=True).init(jax.random.key(0), TOKENS)["params"]
    kernel = np.asarray(params["scanned_blocks"]["block_0"]["attention"]["query"]["kernel"])
    assert kernel.shape == (3, 8, 8)
    assert len({layer.tobytes() for layer in kernel}) == 3


class DroppedOnes(nn.Module):
    """A feed-forward module that shows its dropout mask: 0 or 2, whatever comes in."""

    @nn.compact
    def __call__(self, x, *, valid=None, token_ids=None, deterministic=True):
        return nn.Dropout(0.5)(jnp.ones_like(x), deterministic=deterministic), None


def test_remat_recomputes_with_the_same_dropout_and_routing(random_params):
    fields = dict(num_layers=2, dropout=0.5, moe=moe)
    params = random_params(model(**fields), TOKENS)["params"]

    def loss(params, remat):
        arguments = dict(
            deterministic=False, rngs={"dropout": jax.random.key(0), "router": jax.random.key(1)}
        )
        logits, info = model(**fields, remat=remat).apply({"params": params}, TOKENS, **arguments)
        return jnp.mean(logits**2), info.routing.expert

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    ((value, expert), gradients), ((got, got_expert), got_gradients) = (
        run(params, remat) for remat in (False, True)
    )
    np.testing.assert_allclose(got, value, rtol=1e-6)
    np.testing.assert_array_equal(got_expert, expert)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got_gradients, gradients)


def test_scanned_layers_draw_different_dropout_masks(random_params):
    # With embedding and attention 0 the sum of both layers' masks is normalised, then read through
    # an identity head: one mask drawn twice would leave 0 and 4, two masks leave 0, 2 and 4.
    fields = dict(vocab_size=8, num_layers=2, tie_embeddings=False, dense=DroppedOnes)
    lm = model(**fields, scan_layers=True, remat=True)
    zeros = jax.tree.map(jnp.zeros_like, random_params(lm, TOKENS % 8)["params"])
    params = zeros | {"head": {"kernel": jnp.eye(8)}, "final_norm": {"scale": jnp.ones(8)}}

    @jax.jit
    def forward(key):
        arguments = dict(deterministic=False, rngs={"dropout": key, "router": key})
        return lm.apply({"params": params}, TOKENS % 8, **arguments)[0]

    logits = np.asarray(forward(jax.random.key(0)))
    sums = 4 * logits / logits.max(axis=-1, keepdims=True)
    assert {0, 2, 4} <= set(np.round(sums.ravel(), 3))
    np.testing.assert_array_equal(logits, forward(jax.random.key(0)))
    assert np.any(logits != forward(jax.random.key(1)))


def test_the_other_layout_is_refused(random_params):
    params = random_params(model(), TOKENS)["params"]
    with pytest.raises(ValueError, match="got the keys .*; allowed: with 'scanned_blocks'"):
        unstack_layers(params)
    with pytest.raises(ValueError, match="got the keys .*; allowed: with 'blocks'"):
        stack_layers(stack_layers(params))
