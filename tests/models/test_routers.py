"""The routers of a model stacked and unstacked; recorded choices run again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import Mlp, MoE
from moe_jax.models import (
    LanguageModel,
    changed_sets,
    load_choice,
    record_choice,
    replay_choice,
    save_choice,
    stack_routers,
    unstack_routers,
)
from moe_jax.routing import ROUTERS, make_router

V, E, L = 11, 4, 2
TOKENS = np.random.default_rng(0).integers(0, V, size=(2, 6)).astype(np.int32)
REPEATABLE = sorted(set(ROUTERS) - {"smear", "soft_moe"})


def model(name="softmax_top_k", scan_layers=False, moe_every=1, num_layers=2, **fields):
    def moe():
        dtype = fields.get("dtype", jnp.float32)
        implementation = fields.get("implementation", "einsum")
        method = make_router(name, k=2)
        return MoE(E, 6, method, implementation=implementation, dtype=dtype)

    return LanguageModel(
        vocab_size=V,
        width=8,
        num_layers=num_layers,
        num_heads=2,
        dense=lambda: Mlp(12),
        moe=moe,
        moe_every=moe_every,
        scan_layers=scan_layers,
        dtype=fields.get("dtype", jnp.float32),
    )


@functools.cache
def variables_of(name, scan_layers=False):
    shapes = jax.eval_shape(model(name, scan_layers).init, jax.random.key(0), TOKENS)
    rng = np.random.default_rng(0)

    def fill(s):
        if s.dtype == jnp.uint32:
            return jnp.asarray(rng.integers(0, 2**32, s.shape), jnp.uint32)
        return jnp.asarray(np.abs(rng.normal(size=s.shape)) / 2, s.dtype)

    return jax.tree.map(fill, shapes)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("collection", ["params", "router_state"])
def test_stacking_and_back(scan_layers, collection):
    tree = variables_of("scheduled_top_k", scan_layers)[collection]
    stacked = stack_routers(tree)
    assert all(leaf.shape[0] == L for leaf in jax.tree.leaves(stacked))
    back = unstack_routers(stacked, tree)
    if collection == "router_state":
        jax.tree.map(np.testing.assert_array_equal, back, tree)
    again = stack_routers(back)
    jax.tree.map(np.testing.assert_array_equal, again, stacked)


def test_layers_are_in_the_order_of_the_blocks():
    lm = model(num_layers=12)
    params = jax.eval_shape(lm.init, jax.random.key(0), TOKENS)["params"]
    for i in range(12):
        router = params["blocks"][f"block_{i}"]["feed_forward"]["router"]
        router["kernel"] = jnp.full(router["kernel"].shape, i)
    assert stack_routers(params)["kernel"][:, 0, 0].tolist() == list(range(12))


def test_a_dense_model_has_no_routers():
    assert stack_routers({"blocks": {"block_0": {"norm": {"scale": jnp.ones(3)}}}}) == {}
    assert stack_routers({}) == {}


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", REPEATABLE)
def test_a_repeated_choice_gives_the_same_numbers(name, scan_layers):
    lm, variables = model(name, scan_layers), variables_of(name, scan_layers)
    apply = jax.jit(lm.apply)
    logits, info = apply(variables, TOKENS)
    chosen = record_choice(info)
    again, repeated = apply(replay_choice(variables, chosen), TOKENS)
    np.testing.assert_array_equal(record_choice(repeated), chosen)
    np.testing.assert_allclose(again, logits, atol=1e-5)
    np.testing.assert_allclose(repeated.routing.gate, info.routing.gate, atol=1e-6)


@pytest.mark.parametrize("name", ["smear", "soft_moe"])
def test_a_soft_choice_cannot_be_recorded(name):
    info = jax.eval_shape(model(name).apply, variables_of(name), TOKENS)[1]
    with pytest.raises(ValueError, match="allowed: TokenChoice, ExpertChoice"):
        record_choice(info)


def test_bfloat16_with_the_choice_of_float32_differs_by_rounding_only():
    variables = variables_of("softmax_top_k")
    tokens = np.random.default_rng(1).integers(0, V, size=(16, 32)).astype(np.int32)
    logits, info = jax.jit(model().apply)(variables, tokens)
    chosen = record_choice(info)
    low = jax.jit(model(dtype=jnp.bfloat16).apply)
    free, free_info = low(variables, tokens)
    flipped = changed_sets(chosen, record_choice(free_info), E)
    assert flipped.shape == (L, 512) and 0 < flipped.mean() < 0.1
    forced, forced_info = low(replay_choice(variables, chosen), tokens)
    assert not changed_sets(chosen, record_choice(forced_info), E).any()
    # Where a choice flips the output jumps; with the stored choice only rounding is left.
    at = flipped.any(axis=0)
    error = [np.abs(np.asarray(y - logits)).reshape(512, V)[at].mean() for y in (free, forced)]
    assert error[1] < 0.5 * error[0]


def test_other_kernels_and_checkpoints_repeat_a_choice():
    variables = variables_of("smooth_top_k")
    logits, info = jax.jit(model("smooth_top_k").apply)(variables, TOKENS)
    repeat = replay_choice(variables, record_choice(info))
    other = model("smooth_top_k", implementation="sorted")
    np.testing.assert_allclose(jax.jit(other.apply)(repeat, TOKENS)[0], logits, atol=1e-5)
    # Another checkpoint: the experts of the first with gates of its own, which still sum to one.
    trained = variables | {"params": jax.tree.map(lambda x: 1.1 * x, variables["params"])}
    repeat = replay_choice(trained, record_choice(info))
    _, moved = jax.jit(model("smooth_top_k").apply)(repeat, TOKENS)
    assert (np.asarray(moved.routing.gate) != np.asarray(info.routing.gate)).any()
    np.testing.assert_allclose(np.sum(moved.routing.gate, axis=-1), 1, rtol=1e-5)


def test_changed_sets_by_hand():
    before = jnp.array([[[0, 1], [2, 3], [4, 4], [0, 4]]])  # E = 4: 4 is an empty slot
    after = jnp.array([[[1, 0], [2, 1], [4, 4], [4, 1]]])
    assert changed_sets(before, after, 4).tolist() == [[False, True, False, True]]


def test_a_choice_on_disk(tmp_path):
    chosen = np.arange(24, dtype=np.int32).reshape(2, 6, 2)
    save_choice(tmp_path / "choice.npz", TOKENS, chosen)
    tokens, loaded = load_choice(tmp_path / "choice.npz")
    np.testing.assert_array_equal(tokens, TOKENS)
    np.testing.assert_array_equal(loaded, chosen)
    (tmp_path / "other.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="other.npz: got no recorded choice"):
        load_choice(tmp_path / "other.npz")


def test_a_choice_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"chosen: got shape \(3, 12, 2\); allowed: \[2, ...\]"):
        replay_choice(variables_of("softmax_top_k"), jnp.zeros((3, 12, 2), jnp.int32))


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_who_sees_later_tokens(name):
    """The last token moves earlier outputs where the router says so, and only there."""
    lm, variables = model(name), variables_of(name)
    apply = jax.jit(lm.apply)
    other = TOKENS.copy()
    other[:, -1] = (other[:, -1] + 1) % V
    before, after = apply(variables, TOKENS)[0], apply(variables, other)[0]
    assert (before[:, -1] != after[:, -1]).any()
    if make_router(name, k=2).sees_future == "always":
        assert (np.abs(before - after)[:, :-1] > 1e-5).any()
    else:
        np.testing.assert_allclose(before[:, :-1], after[:, :-1], atol=1e-6)
