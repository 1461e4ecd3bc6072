"""The mixture-of-experts layer against a loop over tokens, its gradients against all experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers import Mlp, MoE
from moe_jax.routing import ROUTERS, LogitsRouter, TokenChoice, make_router

E, F, D, K = 4, 6, 5, 2
top_2 = make_router("softmax_top_k", k=K)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def layer(**fields):
    """The layer with the dispatcher that compiles fastest, where the dispatcher does not matter."""
    defaults = dict(num_experts=E, expert_width=F, method=top_2, implementation="einsum")
    return MoE(**(defaults | fields))


def apply(moe, params, x, **arguments):
    return jax.jit(moe.apply)(params, x, **arguments)


def feed_forward(x, weights, activation=jax.nn.gelu):
    hidden = x @ weights["w_in"] + weights.get("b_in", 0)
    if "w_gate" in weights:
        hidden = activation(x @ weights["w_gate"]) * hidden
    else:
        hidden = activation(hidden)
    return hidden @ weights["w_out"] + weights.get("b_out", 0)


def token_by_token(params, x, *, valid=None, capacity=None):
    """Reference: tokens in order take room with their best experts in order, while there is any."""
    params = params["params"]
    x, shape = x.reshape(-1, D), x.shape
    valid = np.ones(len(x), bool) if valid is None else np.asarray(valid).reshape(-1)
    probs = np.asarray(jax.nn.softmax(x @ params["router"]["kernel"]))
    y, load, dropped = np.zeros_like(x), np.zeros(E, int), np.zeros(E, int)
    for t in np.flatnonzero(valid):
        for e in np.argsort(-probs[t])[:K]:
            load[e] += 1
            if capacity is not None and load[e] > capacity:
                dropped[e] += 1
                continue
            weights = {name: value[e] for name, value in params["experts"].items()}
            y[t] += probs[t, e] * feed_forward(x[t], weights)
        if "shared" in params:
            y[t] += shared_expert(params, x[t])
    return y.reshape(shape), dropped


def shared_expert(params, x):
    shared = params["shared"]
    names = dict(w_in=("in", "kernel"), w_gate=("gate", "kernel"), w_out=("out", "kernel"))
    names |= dict(b_in=("in", "bias"), b_out=("out", "bias"))
    weights = {w: shared[a][b] for w, (a, b) in names.items() if b in shared.get(a, {})}
    return feed_forward(x, weights)


def all_experts_at_once(params, x, valid):
    """Reference with gradients: every expert on every token, weighted by its gate or 0."""
    params = params["params"]
    probs = jax.nn.softmax(x @ params["router"]["kernel"])
    chosen = jax.nn.one_hot(jax.lax.top_k(probs, K)[1], E).sum(-2)
    outputs = jax.vmap(feed_forward, (None, 0), -2)(x, params["experts"])
    y = jnp.einsum("...e,...ed->...d", probs * chosen, outputs)
    return jnp.where(valid[..., None], y + shared_expert(params, x), 0)


@pytest.mark.parametrize(
    "implementation, capacity_factor, capacity",
    [
        ("dropless", None, None),
        ("dropless", 0.5, 3),
        ("sorted", None, None),
        ("sorted", 0.5, 3),
        ("einsum", 0.5, 3),
        ("einsum", 1.25, 8),
    ],
)
def test_equals_the_loop(random_params, implementation, capacity_factor, capacity):
    # T = 12: capacity ceil(2 * 12 * 0.5 / 4) = 3 and ceil(2 * 12 * 1.25 / 4) = 8.
    moe = layer(implementation=implementation, capacity_factor=capacity_factor)
    x = normal(3, 4, D)
    params = random_params(moe.init, x)
    y, info = apply(moe, params, x)
    expected, dropped = token_by_token(params, x, capacity=capacity)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(info.dropped, dropped)
    assert (capacity == 3) == (dropped.sum() > 0)


def test_capacity_counts_the_tokens_of_the_whole_batch(random_params):
    # One sequence of 12 tokens and three of 4 are the same 12 tokens: the same result.
    moe = layer(capacity_factor=0.5)
    x = normal(12, D)
    params = random_params(moe.init, x)
    flat, flat_info = apply(moe, params, x)
    batched, batched_info = apply(moe, params, x.reshape(3, 4, D))
    np.testing.assert_array_equal(flat.reshape(3, 4, D), batched)
    jax.tree.map(np.testing.assert_array_equal, flat_info, batched_info)
    # Padding takes no room but counts: with 12 invalid tokens more the capacity is 6.
    valid = jnp.arange(24) < 12
    padded, info = apply(moe, params, jnp.pad(x, ((0, 12), (0, 0))), valid=valid)
    expected, dropped = token_by_token(params, x, capacity=6)
    np.testing.assert_allclose(padded[:12], expected, atol=1e-5)
    np.testing.assert_array_equal(info.dropped, dropped)


@pytest.mark.parametrize("implementation, glu", [("dropless", True), ("sorted", False)])
def test_output_and_gradients_with_biases_padding_and_shared_experts(
    random_params, implementation, glu
):
    moe = layer(implementation=implementation, glu=glu, use_bias=True, num_shared_experts=2)
    x, weight = normal(3, 4, D), normal(3, 4, D, seed=1)
    valid = jnp.array([[1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    params = random_params(moe.init, x)

    @functools.partial(jax.jit, static_argnums=0)
    def output_and_gradients(f, params, x):
        y, pull_back = jax.vjp(f, params, x)
        return y, pull_back(weight)

    got = output_and_gradients(lambda p, x: moe.apply(p, x, valid=valid)[0], params, x)
    expected = output_and_gradients(lambda p, x: all_experts_at_once(p, x, valid), params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), got, expected)
    np.testing.assert_allclose(got[0], token_by_token(params, x, valid=valid)[0], atol=5e-5)
    np.testing.assert_array_equal(got[0][~valid], np.zeros((7, D)))


def test_invalid_tokens_are_routed_nowhere(random_params):
    moe = layer(num_shared_experts=1, use_bias=True, capacity_factor=1.0)
    x = normal(2, 4, D)
    valid = jnp.array([[True, False, True, True], [False] * 4])
    params = random_params(moe.init, x)
    y, info = apply(moe, params, x, valid=valid)
    invalid = ~valid.ravel()
    assert (info.routing.expert[invalid] == E).all() and (info.routing.gate[invalid] == 0).all()
    np.testing.assert_array_equal(y[~valid], np.zeros((5, D)))
    assert (jnp.abs(y[valid]).max(-1) > 0).all()
    # What stands at invalid places is nobody's business.
    other = jnp.where(valid[..., None], x, 1e3)
    np.testing.assert_array_equal(apply(moe, params, other, valid=valid)[0], y)


def test_info_is_the_routing_of_the_flattened_tokens(random_params):
    x = normal(2, 3, D)
    params = random_params(layer().init, x)
    _, info = apply(layer(), params, x)
    logits = x.reshape(6, D) @ params["params"]["router"]["kernel"]
    expected = top_2(logits)
    np.testing.assert_array_equal(info.routing.expert, expected.expert)
    for got, want in zip(info.routing, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
        assert got.dtype == want.dtype
    assert info.dropped.tolist() == [0] * E and info.dropped.dtype == jnp.int32


def test_one_expert_is_a_dense_network(random_params):
    moe = layer(num_experts=1, method=make_router("softmax_top_k", k=1))
    x = normal(3, D)
    params = random_params(moe.init, x)
    w_in, w_out = (params["params"]["experts"][name][0] for name in ("w_in", "w_out"))
    y, _ = apply(moe, params, x)
    dense, _ = Mlp(F).apply({"params": {"in": {"kernel": w_in}, "out": {"kernel": w_out}}}, x)
    np.testing.assert_allclose(y, dense, atol=1e-6)


def test_bfloat16_experts_are_chosen_as_in_float32(random_params):
    x = normal(64, D).astype(jnp.bfloat16)
    moe = layer(dtype=jnp.bfloat16, num_shared_experts=1)
    params = random_params(moe.init, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    y, info = apply(moe, params, x)
    in_float32, expected = apply(layer(num_shared_experts=1), params, x.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, info, expected)
    assert y.dtype == jnp.bfloat16 and info.routing.logits.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), in_float32, atol=0.05)


def test_priority_reaches_the_dispatch():
    # Router logits are x itself. Each expert holds ceil(2 * 2 * 0.5 / 2) = 1 assignment. Token 0
    # wants expert 0, then 1, and takes both by arrival. Token 1 wants expert 1, then 0: by first
    # choice it gets expert 1 before token 0's second choice.
    params = {
        "router": {"kernel": jnp.eye(2)},
        "experts": {"w_in": jnp.ones((2, 2, 1)), "w_out": jnp.ones((2, 1, 2))},
    }
    x = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    zeros = {}
    for priority in ("arrival", "first_choice"):
        moe = layer(num_experts=2, expert_width=1, capacity_factor=0.5, priority=priority)
        y, info = apply(moe, {"params": params}, x)
        assert info.dropped.tolist() == [1, 1]
        zeros[priority] = (y == 0).all(axis=-1).tolist()
    assert zeros == {"arrival": [False, True], "first_choice": [False, False]}


def test_dropout_is_on_the_output_and_only_in_training(random_params):
    moe = layer(dropout=0.5, num_shared_experts=1)
    x = normal(8, D)
    params = random_params(moe.init, x)
    y, _ = apply(moe, params, x)
    dropped, _ = moe.apply(
        params,
        x,
        deterministic=False,
        rngs={"dropout": jax.random.key(0), "router": jax.random.key(1)},
    )
    np.testing.assert_allclose(dropped, jnp.where(dropped == 0, 0, 2 * y), rtol=1e-5)
    assert 0.2 < np.mean(dropped == 0) < 0.8


def test_parameters():
    moe = layer(glu=True, num_shared_experts=3)
    params = jax.eval_shape(moe.init, jax.random.key(0), jnp.zeros((1, D)))["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "router": {"kernel": (D, E)},
        "experts": {"w_in": (E, D, F), "w_gate": (E, D, F), "w_out": (E, F, D)},
        "shared": {
            "in": {"kernel": (D, 3 * F)},
            "gate": {"kernel": (D, 3 * F)},
            "out": {"kernel": (3 * F, D)},
        },
    }


def none_chosen(logits, k, *, valid=None):
    slots = (logits.shape[0], 3)
    return TokenChoice(jnp.full(slots, E), jnp.zeros(slots), logits, jnp.zeros_like(logits))


def test_a_route_may_leave_every_slot_empty(random_params):
    moe = layer(method=LogitsRouter(k=2, method=none_chosen))
    x = normal(3, D)
    y, info = apply(moe, random_params(moe.init, x), x)
    np.testing.assert_array_equal(y, np.zeros((3, D)))
    assert info.routing.expert.shape == (3, 3)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(method=make_router("softmax_top_k", k=5)), r"k: got 5; allowed: 1..4"),
        (dict(method=make_router("softmax_top_k", k=0)), r"k: got 0; allowed: 1..4"),
        (dict(num_shared_experts=-1), "num_shared_experts: got -1; allowed: 0 or more"),
        (dict(capacity_factor=0.0), "capacity factor: got 0.0"),
        (dict(implementation="dense"), "implementation: got 'dense'; allowed: dropless"),
        (dict(priority="last"), "priority: got 'last'; allowed: arrival"),
        (dict(num_experts=1), "k: got 2; allowed: 1..1"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layer(**fields).init, jax.random.key(0), jnp.zeros((3, D)))


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_nan_at_invalid_places_reaches_no_gradient(random_params, name):
    moe = layer(method=make_router(name, k=K), num_shared_experts=1)
    valid = jnp.arange(8) % 4 != 3
    x, ids = normal(2, 8, D), jnp.arange(16).reshape(2, 8)
    variables = random_variables(random_params, moe, x, ids)
    state = {key: value for key, value in variables.items() if key != "params"}

    @jax.jit
    def gradients(params, x):
        def loss(params, x):
            both = jnp.broadcast_to(valid, (2, 8))
            variables = state | {"params": params}
            y, info = moe.apply(variables, x, valid=both, token_ids=ids)
            return jnp.sum(y**2) + sum(jax.tree.leaves(info.losses), 0.0)

        return jax.grad(loss, (0, 1))(params, x)

    clean = gradients(variables["params"], jnp.where(valid[..., None], x, 0.0))
    dirty = gradients(variables["params"], jnp.where(valid[..., None], x, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def random_variables(random_params, moe, x, ids):
    """Random weights, and the state that a method starts with."""
    first = jax.jit(moe.init)(jax.random.key(0), x, token_ids=ids)
    shapes = jax.eval_shape(moe.init, jax.random.key(0), x, token_ids=ids)
    weights = random_params(lambda key: shapes["params"])
    return first | {"params": weights}


@pytest.mark.parametrize("method", ["softmax_top_k", print])
def test_a_method_is_a_router(method):
    with pytest.raises(ValueError, match="MoE.method: got .*; allowed: a Router, such as"):
        jax.eval_shape(layer(method=method).init, jax.random.key(0), jnp.zeros((3, D)))


def test_no_capacity_without_assignments():
    moe = layer(method=make_router("smear", k=K), capacity_factor=1.0)
    with pytest.raises(ValueError, match="MoE.capacity_factor: got 1.0; allowed: None with Smear"):
        jax.eval_shape(moe.init, jax.random.key(0), jnp.zeros((3, D)))


def test_a_backend_by_name_computes(random_params):
    moe, x = layer(implementation="dropless"), normal(7, D)
    params = random_params(moe.init, x)
    named = layer(implementation="dropless", backend="reference")
    np.testing.assert_allclose(
        apply(named, params, x)[0], apply(moe, params, x)[0], rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="backend: got 'fast'; allowed: xla_cpu"):
        layer(backend="fast").apply(params, x)


def test_einsum_has_forward_derivatives(random_params):
    moe, x = layer(implementation="einsum"), normal(7, D)
    params, direction = random_params(moe.init, x), normal(7, D, seed=1)

    def f(x):
        return moe.apply(params, x)[0]

    _, forward = jax.jvp(f, (x,), (direction,))
    weight = normal(7, D, seed=2)
    (backward,) = jax.vjp(f, x)[1](weight)
    np.testing.assert_allclose(jnp.sum(weight * forward), jnp.sum(backward * direction), rtol=1e-4)
