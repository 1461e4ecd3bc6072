"""The language model: composition, causality, padding, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import CausalSelfAttention, Mlp, MoE
from moe_jax.models import LanguageModel
from moe_jax.routing import make_router

V, D, H, E, K = 11, 8, 2, 4, 2
TOKENS = np.random.default_rng(0).integers(0, V, size=(2, 8)).astype(np.int32)


def dense():
    return Mlp(12)


def moe(implementation="einsum", **fields):  # einsum compiles fastest
    method = make_router("softmax_top_k", k=K)
    return MoE(E, 6, method, num_shared_experts=1, implementation=implementation, **fields)


def model(**fields):
    sizes = dict(vocab_size=V, width=D, num_layers=2, num_heads=H, dense=dense)
    return LanguageModel(**(sizes | fields))


def apply(model, params, tokens, **arguments):
    return jax.jit(model.apply)(params, tokens, **arguments)


@jax.jit
def layers_put_together(params):
    """Reference: a dense block, then one with experts; without a head, the embedding is it."""

    def normalised(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale["scale"]

    x = params["tokens"]["embedding"][TOKENS]
    for i, layer in enumerate([dense(), moe()]):
        block = params["blocks"][f"block_{i}"]
        y = normalised(x, block["attention_norm"])
        x = x + CausalSelfAttention(H).apply({"params": block["attention"]}, y)
        y = normalised(x, block["feed_forward_norm"])
        y, info = layer.apply({"params": block["feed_forward"]}, y)
        x = x + y
    embedding = params["tokens"]["embedding"]
    head = params["head"]["kernel"] if "head" in params else embedding.T
    return normalised(x, params["final_norm"]) @ head, info


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_equals_the_layers_put_together(random_params, tie_embeddings):
    lm = model(moe=moe, moe_every=2, tie_embeddings=tie_embeddings)
    params = random_params(lm, TOKENS)
    assert ("head" in params["params"]) != tie_embeddings
    logits, info = apply(lm, params, TOKENS)
    expected, expected_info = layers_put_together(params["params"])
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    np.testing.assert_array_equal(info.routing.expert[0], expected_info.routing.expert)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-4), info, expected_info)


def test_dense_model_has_no_routing(random_params):
    lm = model()
    logits, info = apply(lm, random_params(lm, TOKENS), TOKENS)
    assert info is None
    assert logits.shape == (2, 8, V) and logits.dtype == jnp.float32


@pytest.mark.parametrize(
    "num_layers, moe_every, with_experts", [(4, 1, [0, 1, 2, 3]), (5, 2, [1, 3]), (3, 3, [2])]
)
def test_every_nth_block_has_experts(num_layers, moe_every, with_experts):
    lm = model(num_layers=num_layers, moe=moe, moe_every=moe_every)
    shapes = jax.eval_shape(lm.init, jax.random.key(0), TOKENS)
    blocks = shapes["params"]["blocks"]
    found = [i for i in range(num_layers) if "router" in blocks[f"block_{i}"]["feed_forward"]]
    assert found == with_experts
    _, info = jax.eval_shape(lm.apply, shapes, TOKENS)
    assert info.routing.expert.shape == (len(with_experts), 16, K)
    assert info.routing.logits.shape == (len(with_experts), 16, E)
    assert info.dropped.shape == (len(with_experts), E)


def test_parameter_names_tell_what_decays():
    lm = model(moe=moe, moe_every=2, tie_embeddings=False)
    shapes = jax.eval_shape(lm.init, jax.random.key(0), TOKENS)
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes)}
    assert names == {"kernel", "embedding", "scale", "w_in", "w_out"}


@pytest.mark.parametrize("implementation", ["dropless", "sorted"])
def test_a_later_token_changes_nothing_bit_for_bit(random_params, implementation):
    lm = model(moe=lambda: moe(implementation))
    params = random_params(lm, TOKENS)
    forward = jax.jit(lm.apply)
    before, _ = forward(params, TOKENS)
    for change in range(1, V, 3):
        changed = TOKENS.copy()
        changed[0, 7] = (changed[0, 7] + change) % V
        after, _ = forward(params, changed)
        np.testing.assert_array_equal(after[:, :7], before[:, :7])
        np.testing.assert_array_equal(after[1], before[1])
        assert np.any(after[0, 7] != before[0, 7])


def test_padding_leaves_valid_tokens_alone(random_params):
    lm, left, right = model(moe=moe), 3, 2
    params = random_params(lm, TOKENS)
    expected, expected_info = apply(lm, params, TOKENS)
    padding = ((0, 0), (left, right))
    padded, valid = np.pad(TOKENS, padding), np.pad(np.ones(TOKENS.shape, bool), padding)
    logits, info = apply(lm, params, padded, valid=valid)
    np.testing.assert_allclose(logits[:, left : left + 8], expected, atol=1e-4)
    experts = np.asarray(info.routing.expert)
    np.testing.assert_array_equal(experts[:, valid.ravel()], expected_info.routing.expert)
    assert (experts[:, ~valid.ravel()] == E).all()


def test_every_parameter_gets_a_finite_gradient_beside_a_row_of_padding(random_params):
    lm = model(moe=moe, moe_every=2, tie_embeddings=False)
    valid = np.array([[True] * 8, [False] * 8])

    def loss(params):
        logits, _ = lm.apply(params, TOKENS, valid=valid)
        return jnp.sum(jnp.where(valid[..., None], logits, 0) ** 2), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(random_params(lm, TOKENS))
    assert np.isfinite(logits).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.any(leaf != 0), jax.tree_util.keystr(path)
    # The tokens of the padded row that are in no other row have no part in it.
    absent = np.setdiff1d(TOKENS[1], TOKENS[0])
    embedding = np.asarray(gradients["params"]["tokens"]["embedding"])
    assert absent.size
    np.testing.assert_array_equal(embedding[absent], np.zeros((absent.size, D)))


@pytest.mark.parametrize("tie_embeddings, scan_layers", [(True, False), (False, True)])
def test_bfloat16_compute_gives_float32_logits_and_gradients(
    random_params, tie_embeddings, scan_layers
):
    bfloat16_moe = functools.partial(moe, dtype=jnp.bfloat16)
    fields = dict(moe=bfloat16_moe, tie_embeddings=tie_embeddings, scan_layers=scan_layers)
    lm = model(**fields, dtype=jnp.bfloat16)
    params = random_params(lm, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients_and_outputs(params):
        logits, info = lm.apply(params, TOKENS)
        return jnp.mean(logits**2), (logits, info)

    gradients, (logits, info) = gradients_and_outputs(params)
    assert logits.dtype == info.routing.logits.dtype == jnp.float32
    # Accumulated and kept in float32, not rounded to bfloat16's 8 bits on the way.
    assert np.any(logits != logits.astype(jnp.bfloat16).astype(jnp.float32))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert leaf.dtype == jnp.float32, jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all() and np.any(leaf != 0), jax.tree_util.keystr(path)


def test_dropout_is_random_in_training_and_off_in_evaluation(random_params):
    def dropped_mlp():
        return Mlp(12, dropout=0.5)

    lm, without = model(dense=dropped_mlp, dropout=0.5), model()
    params = random_params(lm, TOKENS)
    forward = jax.jit(lambda key: lm.apply(params, TOKENS, deterministic=False, rngs=key)[0])
    keys = [{"dropout": jax.random.key(i)} for i in (0, 0, 1)]
    first, again, other = (forward(key) for key in keys)
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    evaluated, _ = apply(lm, params, TOKENS)
    np.testing.assert_array_equal(evaluated, apply(without, params, TOKENS)[0])


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_initial_logits_have_variance_one(tie_embeddings):
    # The final norm gives rows of mean square 1, and the head has variance 1/d.
    lm = LanguageModel(64, 32, 1, 2, dense=lambda: Mlp(32), tie_embeddings=tie_embeddings)
    tokens = np.random.default_rng(0).integers(0, 64, size=(4, 16))
    logits, _ = apply(lm, lm.init(jax.random.key(0), tokens), tokens)
    others = np.arange(64) != tokens[..., None]  # a tied head knows the token that came in
    np.testing.assert_allclose(np.std(np.asarray(logits)[others]), 1.0, rtol=0.1)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_layers=0), "num_layers: got 0; allowed: 1 or more"),
        (dict(moe=moe, moe_every=0), "moe_every: got 0; allowed: 1..2"),
        (dict(moe=moe, moe_every=3), "moe_every: got 3; allowed: 1..2"),
        (
            dict(num_layers=5, moe=moe, moe_every=2, scan_layers=True),
            "num_layers: got 5; allowed with scan_layers: multiples of 2",
        ),
        (dict(num_heads=3), "num_heads: got 3 for width 8"),
        (dict(num_heads=8), "num_heads: got 8 for width 8.*even head size"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model(**fields).init, jax.random.key(0), TOKENS)


@pytest.mark.parametrize(
    "tokens, valid, message",
    [
        (TOKENS[0], None, r"tokens: got int32\(8,\); allowed: int\[B, S\]"),
        (TOKENS.astype(np.float32), None, "tokens: got float32"),
        (TOKENS, np.ones((2, 7), bool), r"valid: got shape \(2, 7\); allowed: \(2, 8\)"),
    ],
)
def test_wrong_inputs_are_refused(tokens, valid, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda key: model().init(key, tokens, valid=valid), jax.random.key(0))
