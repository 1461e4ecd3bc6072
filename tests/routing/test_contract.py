"""What every router of the registry promises, in training and in evaluation.

A new router is covered by its line in the registry. Where a promise cannot hold for a method, the
tables below say so and why, and nothing else is left out.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_vjp

from moe_jax.analysis import expected_drop_fraction
from moe_jax.dispatch import capacity as capacity_of
from moe_jax.dispatch import positions
from moe_jax.routing import (
    ROUTERS,
    ExpertChoice,
    ExpertMerge,
    Observed,
    Routed,
    RouterInputs,
    SoftChoice,
    TokenChoice,
    dense_gates,
    expert_choice,
    load_balance_loss,
    make_router,
    noisy_logits,
    sigmoid_top_k,
    smooth_load,
    smooth_top_k,
    soft_moe_weights,
    softmax_top_k,
    top_k_softmax,
    z_loss,
)

# d = E, so that an identity as the router's matrix makes the logits the tokens themselves.
T, E, K, C = 12, 8, 2, 3


class Case(NamedTuple):
    name: str
    training: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self):
        words = [self.name, *(f"{name}={value}" for name, value in self.arguments)]
        return " ".join(words + ["training"] * self.training)


# Arguments that make more of a method visible at this size than its defaults.
ARGUMENTS = {
    "cosine_top_k": {"projection_width": E},
    "relu_gate": {"initial_weight": 0.1},
    "scheduled_top_k": {"minimum": 1.0},  # logits over 1 where the matrix is the identity
    "smooth_top_k": {"initial_eta": 0.0},  # a margin of log 2
    "soft_moe": {"slots_per_expert": 3},
}
# Those that make something else of a key than of none. For the others evaluation is training,
# which test_only_these_use_the_key checks.
USES_KEY = {"base_assignment", "noisy_top_k", "sinkhorn"}
VARIANTS = [
    Case("relu_gate", arguments=(("max_active", 3),)),
    Case("sigmoid_top_k", arguments=(("num_groups", 4), ("renormalize", False), ("top_groups", 2))),
    Case("smooth_top_k", training=True, arguments=(("noise", 4.0),)),
    Case("smooth_top_k", arguments=(("a", 1.0), ("b", 50.0), ("stop_margin_gradient", True))),
    Case("softmax_top_k", arguments=(("renormalize", True),)),
    Case("top_p", arguments=(("max_active", 3), ("renormalize", True))),
]
DEFAULTS = [Case(name) for name in sorted(ROUTERS)]
DEFAULTS += [Case(name, training=True) for name in sorted(USES_KEY & set(ROUTERS))]
CASES = DEFAULTS + VARIANTS

NOISE_HAS_A_PLACE = "each pair of token and expert has its own noise, drawn by place"
NO_LOGITS = "experts follow from the token's id alone, there are no logits to set"
NO_SLOTS = "a mixture, without anything that is chosen"

NOT_PERMUTABLE = {
    "noisy_top_k training": NOISE_HAS_A_PLACE,
    "smooth_top_k noise=4.0 training": NOISE_HAS_A_PLACE,
}
NOT_RELABELLED = NOT_PERMUTABLE | {
    "sigmoid_top_k num_groups=4 renormalize=False top_groups=2": "groups are neighbours by index",
}
NO_SET_LOGITS = {"hash": NO_LOGITS}
# Not to be asked for it by a config; the choice by logits of -inf is sound all the same.
LEAVES_OUT_NO_EXPERT = {
    "base_assignment": "balance counts all experts, so some tokens would be left without any",
    "hash": NO_LOGITS,
    "noisy_top_k": "importance and load losses would ask for those left out",
    "relu_gate": "those left out would count as sparsity, by which the loss adapts",
    "sigmoid_top_k": "the bias of those left out would rise",
}
# What all-equal logits of 0.5 choose. Without an entry: the first k experts.
AT_A_TIE = {
    "expert_choice": [0, 1, 2],  # tokens
    "relu_gate": list(range(E)),  # all that are positive
    "relu_gate max_active=3": [0, 1, 2],
    "smooth_top_k": list(range(E)),  # all are within the margin
    "smooth_top_k a=1.0 b=50.0 stop_margin_gradient=True": list(range(E)),
    # Each has 1/8: the fourth reaches the mass of 0.5.
    "top_p": [0, 1, 2, 3, E, E, E, E],
    "top_p max_active=3 renormalize=True": [0, 1, 2],
}
NO_LOWEST_INDEX = NOT_PERMUTABLE | {
    "base_assignment training": "balance spreads equal tokens over the experts",
    "hash": NO_LOGITS,
    "smear": NO_SLOTS,
    "soft_moe": NO_SLOTS,
}
NOT_DIFFERENTIATED = {
    "smooth_top_k a=1.0 b=50.0 stop_margin_gradient=True": "leaves out a part of the gradient",
}
NOT_REPLAYED = {"smear": NO_SLOTS, "soft_moe": NO_SLOTS}
# A stored choice says who may take part, and the logits whether one does.
REPLAYS_A_PART = {"relu_gate", "smooth_top_k"}


def label(case):
    return case.label


every_case = pytest.mark.parametrize("case", CASES, ids=label)


def without(excluded):
    unknown = set(excluded) - {case.label for case in CASES}
    assert not unknown, f"{unknown} name no case"
    cases = [case for case in CASES if case.label not in excluded]
    return pytest.mark.parametrize("case", cases, ids=label)


@pytest.fixture(scope="module", autouse=True)
def compile_once(quick_compilation):
    """For every test of this file."""


@functools.lru_cache
def build(case, settable=False, num_experts=E, k=K, width=E):
    """A router, its weights and its state; ``settable``: logits are the tokens, up to a factor."""
    arguments = ARGUMENTS.get(case.name, {}) | dict(case.arguments)
    router = make_router(case.name, k=k, **arguments)
    weights, keys = {}, jax.random.split(jax.random.key(0), 16)
    for key, (name, weight) in zip(keys, router.weights(width, num_experts).items(), strict=False):
        weights[name] = weight.init(key, weight.shape, jnp.float32)
        if name == "noise_kernel":
            continue
        if weights[name].ndim >= 2:
            weights[name] = 0.5 * jax.random.normal(key, weight.shape)
        if weights[name].ndim >= 2 and settable:
            eye = jnp.eye(*weight.shape[:2])
            weights[name] = jnp.broadcast_to(eye.T, weight.shape[:1:-1] + weight.shape[1::-1]).T
    state = router.state(jax.random.key(1), weights, num_experts)
    if "bias" in state and not settable:
        state["bias"] = 0.1 * jax.random.normal(jax.random.key(2), (num_experts,))
    return router, weights, state


def make_inputs(case, x=None, valid=None, expert_mask=None, chosen=None, seed=0):
    """Everything there, so that all calls have one structure and are compiled once."""
    if x is None:
        x = jnp.asarray(np.random.default_rng(10 + seed).normal(size=(T, E)), jnp.float32)
    masked = case.name not in NO_SET_LOGITS
    return RouterInputs(
        x,
        jnp.asarray(np.ones(len(x)) if valid is None else valid, bool),
        jnp.arange(len(x)) * 7 + seed,
        jax.random.key(20 + seed) if case.training else None,
        jnp.asarray(np.ones(E) if expert_mask is None else expert_mask, bool) if masked else None,
        chosen,
    )


def shares(choice):
    """f32[T, E, n], what each token has of each expert: n weights, 1 but for slots of mixtures."""
    num_tokens, num_experts = choice.probs.shape
    if isinstance(choice, SoftChoice):
        both = jnp.concatenate([choice.dispatch, choice.combine], axis=-1)
        return both.reshape(num_tokens, num_experts, -1)
    if isinstance(choice, ExpertMerge):
        weight = jnp.repeat(choice.weight, num_tokens // choice.weight.shape[0], axis=0)
        return jnp.where(choice.valid[:, None], weight, 0.0)[..., None]
    return dense_gates(choice)[..., None]


@functools.partial(jax.jit, static_argnames=("router", "capacity", "num_sequences"))
def route(router, inputs, weights, state, capacity=C, num_sequences=1):
    return router.route(inputs, weights, state, capacity=capacity, num_sequences=num_sequences)


def output_and_losses(router, x, weights, inputs, state):
    """A number f32[] to which every share of a token adds its own, as in the output of a layer.

    And the losses f32[n]: those of the method, the common ones that it has, and a last one of 0.
    Beside them what was routed.
    """
    routed = router.route(inputs._replace(x=x), weights, state, capacity=C)
    share = shares(routed.choice)
    toward = np.random.default_rng(3).normal(size=share.shape).astype(np.float32)
    losses = list(routed.losses.values())
    if router.default_losses.z is not None:
        losses.append(z_loss(routed.logits, valid=inputs.valid))
    if router.default_losses.load_balance is not None:
        losses.append(load_balance_loss(routed.choice, valid=inputs.valid))
    return (jnp.sum(share * toward), jnp.stack([*losses, jnp.float32(0)])), routed


class Gradients(NamedTuple):
    output: jax.Array
    gradient: tuple
    losses: jax.Array
    loss_gradient: tuple
    routed: Routed


@functools.partial(jax.jit, static_argnames="router")
def gradients(router, inputs, weights, state):
    """The output, its gradient, the losses, the gradient of their sum; towards x and weights.

    Computed as in a model with rematerialisation, which must choose a second time as the first.
    """

    @jax.checkpoint
    def function(x, weights):
        return output_and_losses(router, x, weights, inputs, state)

    (value, losses), backward, routed = jax.vjp(function, inputs.x, weights, has_aux=True)
    gradient = backward((jnp.ones_like(value), jnp.zeros_like(losses)))
    loss_gradient = backward((jnp.zeros_like(value), jnp.ones_like(losses)))
    return Gradients(value, gradient, losses, loss_gradient, routed)


def check_choice(choice, valid):
    """Types, shapes, ranges and empty slots of a choice."""
    num_tokens, num_experts = choice.probs.shape
    valid = np.asarray(valid)
    for name, array in choice._asdict().items():
        expected = {"expert": jnp.int32, "token": jnp.int32, "valid": jnp.bool_}
        assert array.dtype == expected.get(name, jnp.float32), name
    share, probs = np.asarray(shares(choice)), np.asarray(choice.probs)
    assert np.isfinite(share).all() and (share >= 0).all()
    assert np.isfinite(probs).all() and (probs >= 0).all()
    np.testing.assert_array_equal(share[~valid], 0)
    np.testing.assert_array_equal(probs[~valid], 0)
    if isinstance(choice, TokenChoice):
        check_slots(choice.expert, choice.gate, num_experts, num_tokens)
        np.testing.assert_array_equal(choice.expert[~valid], num_experts)
        assert choice.logits.shape == (num_tokens, num_experts)
    elif isinstance(choice, ExpertChoice):
        check_slots(choice.token, choice.gate, num_tokens, num_experts)
        assert set(np.unique(choice.token)) <= {*np.flatnonzero(valid), num_tokens}
    elif isinstance(choice, ExpertMerge):
        assert choice.weight.shape[1] == num_experts and choice.valid.shape == (num_tokens,)
        np.testing.assert_array_equal(choice.valid, valid)
    else:
        assert choice.dispatch.shape == choice.combine.shape


def check_slots(chosen, gate, empty, rows):
    chosen, gate = np.asarray(chosen), np.asarray(gate)
    assert chosen.shape == gate.shape and chosen.shape[0] == rows
    assert ((chosen >= 0) & (chosen <= empty)).all()
    np.testing.assert_array_equal(gate[chosen == empty], 0)
    for row in chosen:
        named = row[row < empty]
        assert len(set(named)) == len(named), f"one twice in {row}"
        assert (row[len(named) :] == empty).all(), f"an empty slot before a full one in {row}"


def finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other, atol=2e-6):
    np.testing.assert_allclose(one, other, atol=atol, rtol=1e-5)


VALID = {
    "left": [0] * 5 + [1] * 7,
    "right": [1] * 7 + [0] * 5,
    "holes": [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1],
}
SETTABLE = without(NO_SET_LOGITS)


@every_case
class TestChoice:
    def test_shapes_dtypes_and_slots(self, case):
        router, weights, state = build(case)
        inputs = make_inputs(case)
        routed = route(router, inputs, weights, state)
        assert type(routed.choice) is router.choice_type
        check_choice(routed.choice, inputs.valid)
        assert routed.logits.shape == (T, E) and routed.logits.dtype == jnp.float32
        for loss in routed.losses.values():
            assert loss.shape == () and loss.dtype == jnp.float32 and np.isfinite(loss)
        if isinstance(routed.choice, TokenChoice):
            assert routed.choice.expert.shape[1] >= min(K, 3)
            # An empty slot counts as the lowest.
            padded = np.pad(routed.choice.logits, ((0, 0), (0, 1)), constant_values=-np.inf)
            slots = np.take_along_axis(padded, np.asarray(routed.choice.expert), axis=1)
            assert (slots[:, :-1] >= slots[:, 1:]).all(), "slots by falling logit"
        if isinstance(routed.choice, ExpertChoice):
            assert routed.choice.token.shape == (E, C)
        if isinstance(routed.choice, SoftChoice):
            assert_close(jnp.sum(routed.choice.combine.reshape(T, -1), axis=1), 1)
            assert_close(jnp.sum(routed.choice.dispatch.reshape(T, -1), axis=0), 1)
            assert_close(jnp.sum(routed.choice.combine, axis=-1).reshape(T, E), routed.choice.probs)
        if isinstance(routed.choice, ExpertMerge):
            assert_close(jnp.sum(routed.choice.weight, axis=1), 1)

    @pytest.mark.parametrize("where", [*VALID, "nowhere"])
    def test_padding_routes_nowhere_and_changes_nothing(self, case, where):
        router, weights, state = build(case)
        valid = np.array(VALID.get(where, [0] * T), bool)
        clean = make_inputs(case, valid=valid)
        # Whatever stands there, NaN included, must not be seen.
        dirty = clean._replace(
            x=jnp.where(valid[:, None], clean.x, jnp.nan),
            token_ids=jnp.where(valid, clean.token_ids, -1),
        )
        routed, other = (route(router, i, weights, state) for i in (clean, dirty))
        check_choice(routed.choice, valid)
        check_choice(other.choice, valid)
        np.testing.assert_array_equal(shares(routed.choice), shares(other.choice))
        np.testing.assert_array_equal(routed.choice.probs, other.choice.probs)
        assert_same(routed.losses, other.losses)
        # Finite rubbish here: x meets the gradient of a matrix in a product, and NaN * 0 is NaN.
        dirty = dirty._replace(x=jnp.where(valid[:, None], clean.x, 1e4))
        one, other = (gradients(router, i, weights, state)[:4] for i in (clean, dirty))
        assert finite(one)
        jax.tree.map(assert_close, one, other)
        for gradient in (one[1][0], one[3][0]):
            np.testing.assert_array_equal(gradient[~valid], 0)
        if where == "nowhere":
            np.testing.assert_array_equal(one[2], 0)

    def test_twice_the_same_and_no_second_compilation(self, case):
        router, weights, state = build(case)
        routed = route(router, make_inputs(case), weights, state)
        compiled = route._cache_size()
        assert_same(routed, route(router, make_inputs(case), weights, state))
        for seed in (1, 2):
            other = route(router, make_inputs(case, seed=seed), weights, state)
            changed = not np.array_equal(shares(other.choice), shares(routed.choice))
            assert changed or case.name == "hash"
        route(router, make_inputs(case, valid=VALID["holes"]), weights, state)
        assert route._cache_size() == compiled

    def test_later_tokens_matter_only_where_the_router_says_so(self, case):
        router, weights, state = build(case)
        inputs = make_inputs(case)
        changed = inputs._replace(
            x=inputs.x.at[-1].set(4 * inputs.x[0]), token_ids=inputs.token_ids.at[-1].set(5)
        )
        before, after = (shares(route(router, i, weights, state).choice) for i in (inputs, changed))
        future = router.sees_future == "always" or (
            router.sees_future == "training" and case.training
        )
        assert np.array_equal(before[:-1], after[:-1]) != future

    def test_losses_are_finite_scalars_with_finite_gradients(self, case):
        router, weights, state = build(case)
        inputs = make_inputs(case)
        found = gradients(router, inputs, weights, state)
        assert finite(found[:4])
        own = list(route(router, inputs, weights, state).losses.values())
        assert_close(found.losses[: len(own)], np.array(own), atol=1e-5)

    def test_state_and_report(self, case):
        router, weights, state = build(case)
        for leaf in jax.tree.leaves(state):
            assert leaf.dtype in (jnp.float32, jnp.uint32)
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
        observed = Observed(
            jnp.arange(2 * E, dtype=jnp.int32).reshape(2, E), jnp.int32(T), jnp.float32(0.6)
        )
        many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), weights)
        updated = router.update(stacked, many, observed)
        assert jax.tree.map(jnp.shape, updated) == jax.tree.map(jnp.shape, stacked)
        assert jax.tree.map(jnp.result_type, updated) == jax.tree.map(jnp.result_type, stacked)
        assert finite(updated)
        for name, value in router.report(weights, state).items():
            assert value.shape == () and value.dtype == jnp.float32, name
            assert np.isfinite(value), name


@without(NOT_PERMUTABLE)
class TestPlaces:
    """Nothing hangs on the place of a token or the name of an expert."""

    def test_rows_that_are_not_there_are_as_invalid_ones(self, case):
        router, weights, state = build(case)
        for valid in VALID.values():
            valid = np.array(valid, bool)
            inputs = make_inputs(case, valid=valid)
            short = inputs._replace(
                x=inputs.x[valid], valid=inputs.valid[valid], token_ids=inputs.token_ids[valid]
            )
            whole = route(router, inputs, weights, state)
            alone = route(router, short, weights, state)
            assert_close(shares(whole.choice)[valid], shares(alone.choice))
            jax.tree.map(assert_close, whole.losses, alone.losses)

    def test_permuting_tokens_permutes_results(self, case):
        router, weights, state = build(case)
        order = np.random.default_rng(0).permutation(T)
        inputs = make_inputs(case, valid=VALID["holes"])
        permuted = inputs._replace(
            x=inputs.x[order], valid=inputs.valid[order], token_ids=inputs.token_ids[order]
        )
        one, other = (route(router, i, weights, state) for i in (inputs, permuted))
        assert_close(shares(one.choice)[order], shares(other.choice))
        assert_close(one.choice.probs[order], other.choice.probs)
        jax.tree.map(assert_close, one.losses, other.losses)


@pytest.mark.filterwarnings("ignore:top_k_softmax with k=1")
@pytest.mark.parametrize("sizes", [(T, 1, 1), (1, 4, 4)], ids=["E=1", "T=1 k=E"])
@pytest.mark.parametrize("case", DEFAULTS, ids=label)
def test_smallest_and_largest(case, sizes):
    num_tokens, num_experts, k = sizes
    router, weights, state = build(case, num_experts=num_experts, k=k)
    x = np.random.default_rng(0).normal(size=(num_tokens, E)).astype(np.float32)
    inputs = make_inputs(case, jnp.asarray(x))._replace(expert_mask=None)
    routed = route(router, inputs, weights, state, capacity=1)
    check_choice(routed.choice, inputs.valid)
    assert finite(routed.losses)
    # relu_gate takes those of positive logit, which may be none.
    if isinstance(routed.choice, TokenChoice) and case.name != "relu_gate":
        used = jnp.sum(routed.choice.expert < num_experts, axis=1)
        assert (
            (used == k).all() if case.name not in ("smooth_top_k", "top_p") else (used >= 1).all()
        )


@without(NOT_RELABELLED)
def test_relabelling_experts_relabels_results(case):
    router, weights, state = build(case)
    order = np.random.default_rng(1).permutation(E)

    def shapes(num_experts):
        weights = {name: weight.shape for name, weight in router.weights(E, num_experts).items()}
        structs = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in weights.items()}
        state = jax.eval_shape(lambda w: router.state(jax.random.key(0), w, num_experts), structs)
        return weights, {name: leaf.shape for name, leaf in state.items()}

    def relabel(arrays, here, more):
        # The axis of the experts is the one that grows with their number.
        arrays = dict(arrays)
        for name in arrays:
            for axis, (size, larger) in enumerate(zip(here[name], more[name], strict=True)):
                if size != larger:
                    arrays[name] = jnp.take(arrays[name], order, axis=axis)
        return arrays

    (weight_shapes, state_shapes), (more_weights, more_state) = shapes(E), shapes(E + 1)
    inputs = make_inputs(case)
    straight = route(router, inputs, weights, state)
    relabelled = route(
        router,
        inputs,
        relabel(weights, weight_shapes, more_weights),
        relabel(state, state_shapes, more_state),
    )
    assert_close(shares(straight.choice)[:, order], shares(relabelled.choice))
    assert_close(straight.choice.probs[:, order], relabelled.choice.probs)
    jax.tree.map(assert_close, straight.losses, relabelled.losses)


def test_only_these_use_the_key():
    for name in sorted(ROUTERS):
        router, weights, state = build(Case(name))
        programs = [
            str(
                jax.make_jaxpr(lambda i, w, s, router=router: router.route(i, w, s, capacity=C))(
                    make_inputs(Case(name))._replace(key=key), weights, state
                ).jaxpr.eqns
            )
            for key in (jax.random.key(0), None)
        ]
        assert (programs[0] != programs[1]) == (name in USES_KEY), name


@SETTABLE
def test_extreme_logits(case):
    router, weights, state = build(case, settable=True)
    rng = np.random.default_rng(2)
    x = np.zeros((T, E), np.float32)
    x[1:5] = [[1e4], [-1e4], [1.0], [-1.0]]
    x[5:8] = rng.choice([-1e4, 1e4], (3, E))
    x[8:10] = rng.choice([-1e4, 0.0, 1e4], (2, E))
    x[10, 3], x[11, 3] = 1e4, -1e4
    inputs = make_inputs(case, x=jnp.asarray(x))
    routed = route(router, inputs, weights, state)
    check_choice(routed.choice, inputs.valid)
    assert finite(gradients(router, inputs, weights, state)[:4])
    every_token = make_inputs(case, x=jnp.zeros((T, E)))
    assert finite(gradients(router, every_token, weights, state)[:4])
    zeros = jax.tree.map(jnp.zeros_like, weights)
    assert finite(gradients(router, make_inputs(case), zeros, state)[:4])


@SETTABLE
def test_experts_of_minus_infinity(case):
    router, weights, state = build(case)
    mask = np.array([1, 0, 1, 1, 0, 1, 1, 0], bool)
    inputs = make_inputs(case, expert_mask=mask)
    routed = route(router, inputs, weights, state)
    check_choice(routed.choice, inputs.valid)
    np.testing.assert_array_equal(shares(routed.choice)[:, ~mask], 0)
    np.testing.assert_array_equal(routed.choice.probs[:, ~mask], 0)
    assert (shares(routed.choice)[:, mask] > 0).any()
    if isinstance(routed.choice, TokenChoice):
        assert not set(np.unique(routed.choice.expert)) & set(np.flatnonzero(~mask))
    assert finite(gradients(router, inputs, weights, state)[:4])
    # Fewer than k, and none.
    for mask in ([1] + [0] * (E - 1), [0] * E):
        inputs = make_inputs(case, expert_mask=np.array(mask, bool))
        routed = route(router, inputs, weights, state)
        check_choice(routed.choice, inputs.valid)
        assert finite(gradients(router, inputs, weights, state)[:4])
        if not any(mask):
            np.testing.assert_array_equal(shares(routed.choice), 0)
            if isinstance(routed.choice, TokenChoice):
                np.testing.assert_array_equal(routed.choice.expert, E)


def test_only_these_cannot_leave_out_experts():
    names = {name for name in ROUTERS if not make_router(name, k=K).can_leave_out_experts}
    assert names == set(LEAVES_OUT_NO_EXPERT)


@SETTABLE
def test_the_same_in_every_way_of_running(case):
    router, weights, state = build(case, settable=True)
    # Quarters, which bfloat16 holds, so that ties abound.
    x = np.random.default_rng(3).integers(-4, 7, (T, E)).astype(np.float32) / 4
    x[0], x[1] = 0.5, 0.0
    inputs = make_inputs(case, x=jnp.asarray(x))

    def plain(x):
        return router.route(inputs._replace(x=x), weights, state, capacity=C)

    vmapped = jax.jit(jax.vmap(plain))(jnp.stack([inputs.x[::-1], inputs.x]).astype(jnp.bfloat16))
    ways = {
        "jit": route(router, inputs, weights, state),
        "vmap, bf16": jax.tree.map(lambda leaf: leaf[1], vmapped),
        "remat, gradient": gradients(router, inputs, weights, state).routed,
    }
    eager = plain(inputs.x)
    if not case.training and case.name not in ("cosine_top_k", "soft_moe"):
        np.testing.assert_array_equal(eager.logits, x)
    for way, routed in ways.items():
        for field in ("expert", "token"):
            if hasattr(eager.choice, field):
                np.testing.assert_array_equal(
                    getattr(routed.choice, field), getattr(eager.choice, field), err_msg=way
                )
        np.testing.assert_allclose(
            shares(routed.choice), shares(eager.choice), atol=1e-6, rtol=1e-6, err_msg=way
        )


@without(NO_LOWEST_INDEX)
def test_ties_go_to_the_lowest_index(case):
    router, weights, state = build(case, settable=True)
    inputs = make_inputs(case, x=jnp.full((T, E), 0.5))
    choice = route(router, inputs, weights, state).choice
    expected = AT_A_TIE.get(case.label, list(range(K)))
    chosen = choice.token if isinstance(choice, ExpertChoice) else choice.expert
    np.testing.assert_array_equal(chosen, np.broadcast_to(expected, chosen.shape))


def test_ties_of_balanced_assignment_are_balanced():
    case = Case("base_assignment", training=True)
    router, weights, state = build(case, settable=True)
    expert = route(router, make_inputs(case, x=jnp.zeros((T, E))), weights, state).choice.expert
    # 12 tokens, 8 experts: no expert more than two of them, in each of the k rounds.
    assert np.bincount(np.ravel(expert), minlength=E + 1)[:E].max() <= 2 * K
    assert (expert < E).all()


@without(NOT_DIFFERENTIATED)
def test_gradient_against_finite_differences(case):
    router, weights, state = build(case, settable=True)
    # Logits of a token 0.4 apart and a bit, so that the differences reach no tie.
    rng = np.random.default_rng(11)
    x = 0.4 * (np.stack([rng.permutation(E) for _ in range(T)]) - 3.5)
    inputs = make_inputs(case, x=jnp.asarray(x + rng.uniform(-0.08, 0.08, x.shape), jnp.float32))
    x_gradient, weight_gradients = gradients(router, inputs, weights, state).gradient

    def check(name, value, gradient, function):
        def vjp(value):
            return function(value), lambda cotangent: (cotangent * gradient,)

        check_vjp(function, vjp, (value,), atol=5e-3, rtol=5e-3, eps=2e-3)
        scale = jnp.linalg.norm(gradient)
        assert scale > 1e-3 or case.name == "hash" or name in flat, name

    # Without noise its size is no matter.
    flat = set() if case.training else {"noise_kernel"}

    def at(x, weights):
        return gradients(router, inputs._replace(x=x), weights, state).output

    check("x", inputs.x, x_gradient, lambda x: at(x, weights))
    for name in weights:
        check(
            name,
            weights[name],
            weight_gradients[name],
            lambda value, name=name: at(inputs.x, weights | {name: value}),
        )


@without(NOT_REPLAYED)
def test_replay_repeats_the_choice(case):
    router, weights, state = build(case)
    inputs = make_inputs(case, valid=VALID["holes"])
    recorded = route(router, inputs, weights, state)
    field = "token" if isinstance(recorded.choice, ExpertChoice) else "expert"
    chosen = getattr(recorded.choice, field)
    replayed = route(router, inputs._replace(chosen=chosen), weights, state)
    jax.tree.map(assert_close, recorded, replayed)
    np.testing.assert_array_equal(getattr(replayed.choice, field), chosen)

    # With other logits, and without the randomness of training.
    other = make_inputs(case._replace(training=False), valid=VALID["holes"], seed=5)
    replayed = route(router, other._replace(chosen=chosen), weights, state).choice
    again = np.asarray(getattr(replayed, field))
    gate = np.asarray(replayed.gate)
    assert np.isfinite(gate).all() and (gate >= 0).all()
    np.testing.assert_array_equal(gate[again == (T if field == "token" else E)], 0)
    if case.name in REPLAYS_A_PART:
        inside = (again[:, :, None] == np.asarray(chosen)[:, None, :]).any(-1)
        assert (inside | (again == E)).all()
    else:
        np.testing.assert_array_equal(again, chosen)
    if case.name != "hash":
        assert not np.array_equal(gate, recorded.choice.gate)


@pytest.mark.parametrize("name", sorted(NOT_REPLAYED))
def test_mixtures_refuse_a_replay(name):
    router, weights, state = build(Case(name))
    inputs = make_inputs(Case(name), chosen=jnp.zeros((T, K), jnp.int32))
    with pytest.raises(ValueError, match="chosen: got a choice"):
        router.route(inputs, weights, state)


@pytest.mark.parametrize("name", ["smear", "soft_moe"])
def test_mixtures_keep_sequences_apart(name):
    case = Case(name)
    router, weights, state = build(case)
    inputs = make_inputs(case, valid=VALID["right"])
    both = route(router, inputs, weights, state, num_sequences=2).choice
    check_choice(both, inputs.valid)
    for half in (slice(0, T // 2), slice(T // 2, T)):
        short = inputs._replace(
            x=inputs.x[half], valid=inputs.valid[half], token_ids=inputs.token_ids[half]
        )
        alone = route(router, short, weights, state).choice
        assert_close(shares(both)[half], shares(alone))


def test_every_router_takes_its_own_arguments_only():
    for name, router in ROUTERS.items():
        kinds = [p.kind for p in inspect.signature(router).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name
        with pytest.raises(ValueError, match=f"argument of router {name}: got 'nonsense'"):
            make_router(name, k=K, nonsense=1)


class TestEquivalences:
    """Methods that are the same function, in value and gradient."""

    @staticmethod
    def same(one, other, logits):
        toward = np.random.default_rng(9).normal(size=logits.shape)

        @functools.partial(jax.grad, has_aux=True)
        def gradient_and_choice(z, route):
            choice = route(z)
            return jnp.sum(dense_gates(choice) * toward), choice

        run = jax.jit(gradient_and_choice, static_argnames="route")
        (gradient, choice), (other_gradient, other_choice) = run(logits, one), run(logits, other)
        np.testing.assert_array_equal(choice.expert[:, :K], other_choice.expert[:, :K])
        assert_close(dense_gates(choice), dense_gates(other_choice))
        assert_close(gradient, other_gradient)

    def logits(self):
        return jnp.asarray(2 * np.random.default_rng(8).normal(size=(T, E)), jnp.float32)

    def test_renormalised_probabilities_are_the_softmax_of_the_chosen(self):
        def renormalised(z):
            choice = softmax_top_k(z, K)
            total = jnp.sum(choice.gate, axis=1, keepdims=True)
            return choice._replace(gate=choice.gate / total)

        self.same(renormalised, lambda z: top_k_softmax(z, K), self.logits())
        self.same(lambda z: softmax_top_k(z, K, renormalize=True), renormalised, self.logits())

    @pytest.mark.parametrize("stop", [False, True])
    @pytest.mark.parametrize("shape", [(2.0, 2.0), (1.0, 50.0)])
    def test_smooth_with_a_vanishing_margin_is_hard(self, shape, stop):
        a, b = shape
        smooth = functools.partial(
            smooth_top_k, k=K, epsilon=1e-6, a=a, b=b, stop_margin_gradient=stop
        )
        self.same(smooth, lambda z: top_k_softmax(z, K), self.logits())

    def test_sigmoid_with_one_group_is_ungrouped(self):
        # All groups are as good as one, also when each expert is a group.
        for groups in (1, 2, E):
            grouped = functools.partial(sigmoid_top_k, k=K, num_groups=groups, top_groups=groups)
            self.same(grouped, lambda z: sigmoid_top_k(z, K), self.logits())
        bias = 0.3 * jax.random.normal(jax.random.key(7), (E,))
        # Two of E groups of one expert each leave the two best experts.
        self.same(
            lambda z: sigmoid_top_k(z, K, bias=bias, num_groups=E, top_groups=K),
            lambda z: sigmoid_top_k(z, K, bias=bias),
            self.logits(),
        )

    def test_expert_choice_of_all_tokens_is_the_softmax(self):
        logits = self.logits()
        choice = expert_choice(logits, T)
        assert_close(dense_gates(choice), jax.nn.softmax(logits))
        np.testing.assert_array_equal(np.sort(choice.token), np.tile(np.arange(T), (E, 1)))

    def test_soft_moe_weights_sum_to_one(self):
        rng = np.random.default_rng(6)
        x, slots = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((T, 5), (5, E, 3)))
        choice = jax.jit(soft_moe_weights)(x, slots)
        assert_close(jnp.sum(choice.dispatch, axis=0), 1)
        assert_close(jnp.sum(choice.combine, axis=(1, 2)), 1)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("num_tokens", [64, 1024, 4096])
def test_drops_of_a_uniform_router(num_tokens, factor):
    cap = capacity_of(num_tokens, 8, 1, factor)
    exact = expected_drop_fraction(num_tokens, 8, factor)
    trials = 400 if num_tokens == 64 else 60
    expert = jnp.asarray(np.random.default_rng(0).integers(0, 8, (trials, num_tokens, 1)))
    position = jax.jit(jax.vmap(lambda e: positions(e, 8, priority="arrival")))(expert)
    dropped = np.mean(position >= cap, axis=(1, 2))
    # Five standard errors, and one assignment in all where hardly any is ever dropped.
    error = 5 * np.std(dropped) / np.sqrt(trials) + 1 / expert.size
    assert abs(np.mean(dropped) - exact) < error + (5e-5 if exact < 1e-4 else 0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_smooth_load_against_samples(k):
    num_experts, samples = 5, 100_000
    logits = jnp.array([[1.0, 0.6, 0.3, 0.0, -0.8]])
    noise_logits = jnp.array([[0.0, -0.5, 0.5, -1.0, 1.0]])
    rng = np.random.default_rng(0)
    noisy = noisy_logits(logits, noise_logits, jax.random.key(0))
    chance = smooth_load(logits, noisy, noise_logits, k)[0]
    scale = np.log1p(np.exp(noise_logits))[0]
    for e in range(num_experts):
        others = np.sort(np.delete(np.asarray(noisy[0]), e))[::-1]
        drawn = logits[0, e] + scale[e] * rng.normal(size=samples)
        share = np.mean(drawn > others[k - 1])
        assert abs(share - chance[e]) < 5 * np.sqrt(0.25 / samples)


def test_noise_explores_only_near_the_boundary():
    case = Case("noisy_top_k", training=True)
    router, weights, state = build(case, settable=True)
    # A noise matrix of zeros: standard deviation log 2. Experts 2 and 3 are 0.2 and 0.4 below the
    # second, the others 9 below, which is 9 / (sqrt 2 log 2) = 9.2 standard deviations.
    x = jnp.array([[10.0, 9.0, 8.8, 8.6, 0.0, 0.0, 0.0, 0.0]])

    def chosen(key):
        return router.route(RouterInputs(x, key=key), weights, state).choice.expert[0]

    expert = jax.jit(jax.vmap(chosen))(jax.random.split(jax.random.key(0), 4000))
    counts = np.bincount(np.ravel(expert), minlength=E)
    assert (counts[:4] > 400).all()
    np.testing.assert_array_equal(counts[4:], 0)
    evaluated = router.route(RouterInputs(x), weights, state).choice.expert
    np.testing.assert_array_equal(evaluated, [[0, 1]])
