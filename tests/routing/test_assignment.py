"""Balanced assignment against scipy, Sinkhorn's plan against a loop, gates against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from moe_jax.routing.assignment import (
    SINKHORN_ITERATIONS,
    BaseAssignment,
    Sinkhorn,
    base_assignment,
    sinkhorn,
    sinkhorn_plan,
)
from moe_jax.routing.router import CommonLosses, RouterInputs

pytestmark = pytest.mark.usefixtures("quick_compilation")

# One compilation for each shape in the whole file, so most tests share (24, 4).
base = jax.jit(base_assignment, static_argnames="k")
plan = jax.jit(sinkhorn_plan, static_argnames="iterations")
route = jax.jit(sinkhorn, static_argnames=("k", "iterations"))
METHODS = [functools.partial(base, k=2), functools.partial(route, k=2)]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def best_assignment(logits):
    """Experts [T] of the largest total, by scipy: each place of an expert is a column."""
    num_tokens, num_experts = logits.shape
    capacity = -(-num_tokens // num_experts)
    # A forbidden pair, -inf, is worse than anything that the others could make up for.
    finite = np.where(logits == -np.inf, -1e9, logits).astype(np.float64)
    _, column = linear_sum_assignment(np.repeat(finite, capacity, axis=1), maximize=True)
    expert = column // capacity
    return np.where(logits[np.arange(num_tokens), expert] == -np.inf, num_experts, expert)


def total(logits, expert):
    """Sum of the chosen logits in float64; empty slots count 0."""
    padded = np.pad(np.asarray(logits, np.float64), ((0, 0), (0, 1)))
    return padded[np.arange(len(logits)), expert].sum()


def loads(expert, num_experts):
    return np.bincount(np.ravel(expert), minlength=num_experts + 1)[:num_experts]


KINDS = {
    "normal": lambda z, rng: z,
    "integers": lambda z, rng: np.round(z),
    "equal": lambda z, rng: np.zeros_like(z),
    "equal rows": lambda z, rng: z[rng.integers(0, (len(z) + 1) // 2, len(z))],
    "+-1e4": lambda z, rng: 1e4 * np.sign(z),
    "large": lambda z, rng: 1e4 * z,
    "skewed": lambda z, rng: np.exp(4 * z),
    "far rows": lambda z, rng: np.round(z) + 4096 * rng.integers(-2, 3, (len(z), 1)),
    "collapsed": lambda z, rng: 0.1 * z + 5 * np.arange(z.shape[1]),
    "low rank": lambda z, rng: z[:, :2] @ rng.normal(size=(z[:, :2].shape[1], z.shape[1])),
    "some -inf": lambda z, rng: np.where(rng.random(z.shape) < 0.4, -np.inf, z),
    "most -inf": lambda z, rng: np.where(rng.random(z.shape) < 0.7, -np.inf, z),
    "column of -inf": lambda z, rng: np.where(np.arange(z.shape[1]) == 0, -np.inf, z),
}


@pytest.mark.parametrize("shape", [(7, 1), (1, 5), (3, 8), (24, 4), (83, 16)])
def test_base_has_the_total_of_the_best_assignment(shape):
    num_tokens, num_experts = shape
    for name, kind in KINDS.items():
        for seed in range(6):
            rng = np.random.default_rng(seed)
            logits = kind(rng.normal(size=shape), rng).astype(np.float32)
            routing = base(logits)
            expert, best = np.asarray(routing.expert[:, 0]), best_assignment(logits)
            message = f"{name}, seed {seed}"
            assert max(loads(expert, num_experts)) <= -(-num_tokens // num_experts), message
            assert (expert == num_experts).sum() == (best == num_experts).sum(), message
            finite = logits[np.isfinite(logits)]
            slack = 1e-5 * (np.ptp(finite) if finite.size else 0) + 1e-9
            assert abs(total(logits, expert) - total(logits, best)) <= slack, message


def test_base_golden():
    # Both tokens prefer expert 0, by 3 and by 1; two tokens, two experts, so one each. Token 0
    # keeps it: 3 + 1 = 4, the other way round 0 + 2 = 2.
    routing = base(jnp.array([[3.0, 0.0], [2.0, 1.0]]))
    assert routing.expert.tolist() == [[0], [1]]
    # sigmoid(3) = 1 / (1 + e^-3) = .952574, sigmoid(1) = .731059.
    np.testing.assert_allclose(routing.gate, [[0.952574], [0.731059]], atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_base_is_balanced_in_every_round(k):
    for seed in range(5):
        logits = normal(seed, 24, 4) + 3 * normal(seed + 100, 4)
        expert = np.asarray(base(logits, k=k).expert)
        # 24 tokens and 4 experts: 6 of each round for each.
        np.testing.assert_array_equal(loads(expert, 4), 6 * k)
        assert all(len(set(row)) == k for row in expert)
        chosen = np.take_along_axis(logits, expert, axis=1)
        assert (np.diff(chosen, axis=1) <= 0).all()


def best_two_rounds(logits):
    """Experts [T, 2], sorted by index."""
    first = best_assignment(logits)
    left = np.where(np.arange(logits.shape[1]) == first[:, None], -np.inf, logits)
    return np.sort(np.stack([first, best_assignment(left)], axis=1))


def test_base_rounds_are_each_the_best_of_what_is_left():
    logits = normal(0, 24, 4)
    np.testing.assert_array_equal(np.sort(base(logits, k=2).expert), best_two_rounds(logits))


def test_base_leaves_a_slot_empty_rather_than_take_an_expert_twice():
    # Token 0 may have expert 0 alone; the second round has nothing for it.
    logits = np.where(np.arange(4) == 0, 1.0, -np.inf) + np.zeros((24, 1))
    logits[1:] = 0.0
    routing = base(logits.astype(np.float32), k=2)
    assert routing.expert[0].tolist() == [0, 4]
    np.testing.assert_allclose(routing.gate[0], [0.731059, 0], atol=1e-6)
    assert (routing.expert[1:] < 4).all()


def test_base_does_not_see_invalid_tokens():
    logits = normal(1, 24, 4)
    valid = np.random.default_rng(2).permutation(24) < 13
    dirty = np.where(valid[:, None], logits, np.nan)
    routing = base(dirty, k=2, valid=valid)
    expert = np.asarray(routing.expert)
    np.testing.assert_array_equal(np.sort(expert[valid]), best_two_rounds(logits[valid]))
    gate = jax.nn.sigmoid(np.take_along_axis(logits[valid], expert[valid], axis=1))
    np.testing.assert_allclose(routing.gate[valid], gate, rtol=1e-6)
    np.testing.assert_array_equal(routing.expert[~valid], 4)
    np.testing.assert_array_equal(routing.gate[~valid], 0)
    np.testing.assert_array_equal(routing.probs[~valid], 0)
    gradient = jax.grad(lambda z: jnp.sum(base(z, chosen=routing.expert, valid=valid).gate))(dirty)
    np.testing.assert_array_equal(gradient[~valid], 0)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("method", METHODS)
def test_no_valid_token(method):
    routing = method(normal(1, 24, 4), valid=np.zeros(24, bool))
    np.testing.assert_array_equal(routing.expert, 4)
    np.testing.assert_array_equal(routing.gate, 0)
    np.testing.assert_array_equal(routing.probs, 0)


def test_base_follows_permuted_tokens_and_relabelled_experts():
    logits = normal(3, 24, 4)
    rows, columns = np.random.default_rng(4).permutation(24), np.array([3, 0, 1, 2])
    straight = np.asarray(base(logits).expert)
    np.testing.assert_array_equal(base(logits[rows]).expert, straight[rows])
    np.testing.assert_array_equal(columns[base(logits[:, columns]).expert], straight)
    # With ties another assignment is as good, but not better.
    ties = np.round(logits)
    expected = total(ties, base(ties).expert[:, 0])
    assert total(ties[rows], base(ties[rows]).expert[:, 0]) == expected
    assert total(ties[:, columns], base(ties[:, columns]).expert[:, 0]) == expected


def test_base_gates_and_their_gradient():
    logits = normal(5, 24, 4)
    routing = base(logits, k=2)
    chosen = np.take_along_axis(logits, np.asarray(routing.expert), axis=1)
    gate = 1 / (1 + np.exp(-chosen))
    np.testing.assert_allclose(routing.gate, gate, rtol=1e-6)
    np.testing.assert_allclose(routing.probs, jax.nn.softmax(logits), rtol=1e-5)

    # d sigmoid = sigmoid (1 - sigmoid), at the chosen experts alone.
    weight = normal(6, 24, 2)
    expected = np.zeros_like(logits)
    np.put_along_axis(expected, np.asarray(routing.expert), weight * gate * (1 - gate), axis=1)
    gradient = jax.grad(lambda z: jnp.sum(base(z, k=2).gate * weight))(logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_base_gradient_against_finite_differences():
    # Any other assignment is worse by far more than a change of 1e-2 could make up for.
    logits = 4 * np.tile(np.eye(4, dtype=np.float32), (6, 1)) + 0.5 * normal(7, 24, 4)
    direction = normal(8, 24, 4)
    higher, lower = base(logits + 1e-2 * direction), base(logits - 1e-2 * direction)
    np.testing.assert_array_equal(higher.expert, lower.expert)
    gate = np.asarray(base(logits).gate)
    expected = gate * (1 - gate) * np.take_along_axis(direction, np.asarray(higher.expert), axis=1)
    np.testing.assert_allclose((higher.gate - lower.gate) / 2e-2, expected, atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
class TestEveryWayOfRunning:
    def test_jit_and_vmap_and_twice(self, method):
        logits = np.stack([normal(seed, 24, 4) * (1 + seed) for seed in range(3)])
        alone = [method(z) for z in logits]
        together = jax.jit(jax.vmap(method))(logits)
        for i, routing in enumerate(alone):
            np.testing.assert_array_equal(together.expert[i], routing.expert)
            np.testing.assert_allclose(together.gate[i], routing.gate, rtol=1e-6)
            jax.tree.map(np.testing.assert_array_equal, method(logits[i]), routing)
        eager = method.func.__wrapped__(logits[0], k=2)
        np.testing.assert_array_equal(eager.expert, alone[0].expert)
        np.testing.assert_allclose(eager.gate, alone[0].gate, rtol=1e-6)

    def test_one_compilation_for_all_values(self, method):
        method(normal(0, 24, 4), valid=np.ones(24, bool))
        before = method.func._cache_size()
        for seed in range(1, 4):
            method(normal(seed, 24, 4), valid=np.arange(24) > seed)
        assert method.func._cache_size() == before

    def test_shapes_and_dtypes(self, method):
        routing = jax.eval_shape(method, jnp.zeros((24, 4), jnp.bfloat16))
        assert routing.expert.shape == routing.gate.shape == (24, 2)
        assert routing.logits.shape == routing.probs.shape == (24, 4)
        assert routing.expert.dtype == jnp.int32
        assert routing.gate.dtype == routing.logits.dtype == routing.probs.dtype == jnp.float32

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_broken_logits_end_and_stay_visible(self, method, bad):
        logits = normal(8, 24, 4)
        logits[3, 1] = bad
        routing = method(logits)
        assert not np.isfinite(np.sum(routing.probs[3]))
        assert ((routing.expert >= 0) & (routing.expert <= 4)).all()
        broken = method(np.full((24, 4), bad, np.float32))
        assert ((broken.expert >= 0) & (broken.expert <= 4)).all()
        if np.isnan(bad):
            assert np.isnan(routing.gate[3]).any() and np.isnan(broken.gate).all()

    def test_minus_infinity_is_never_chosen(self, method):
        logits = normal(9, 24, 4)
        logits[:, 2] = -np.inf
        logits[5] = -np.inf
        logits[7, :3] = -np.inf
        routing = method(logits)
        assert not (routing.expert == 2).any()
        np.testing.assert_array_equal(routing.expert[5], 4)
        np.testing.assert_array_equal(np.asarray(routing.gate)[np.asarray(routing.expert) == 4], 0)
        gradient = jax.grad(lambda z: jnp.sum(method(z, chosen=routing.expert).gate ** 2))(logits)
        assert np.isfinite(routing.gate).all() and np.isfinite(gradient).all()

    def test_replay_computes_the_gates_anew(self, method):
        logits = normal(10, 24, 4)
        routing = method(logits)
        again = method(logits, chosen=routing.expert)
        np.testing.assert_array_equal(again.expert, routing.expert)
        np.testing.assert_allclose(again.gate, routing.gate, rtol=1e-6)
        # Other logits, with other gates, and one slot that was empty.
        chosen = routing.expert.at[0, 1].set(4)
        other = method(2 * logits, chosen=chosen)
        np.testing.assert_array_equal(other.expert, chosen)
        assert other.gate[0, 1] == 0 and not np.allclose(other.gate[1:], routing.gate[1:])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (dict(logits=jnp.zeros((3, 4)), k=5), r"k: got 5; allowed: 1\.\.4"),
            (dict(logits=jnp.zeros((3, 4)), k=0), r"k: got 0; allowed: 1\.\.4"),
            (dict(logits=jnp.zeros(4)), r"logits: got shape \(4,\); allowed: \[T, E\]"),
            (dict(logits=jnp.zeros((3, 4)), valid=jnp.ones(4)), r"valid: got shape \(4,\)"),
        ],
    )
    def test_bad_input(self, method, arguments, message):
        with pytest.raises(ValueError, match=message):
            method(**arguments)


def slow_plan(logits, iterations, valid):
    """Column by column, then row by row, in float64."""
    with np.errstate(under="ignore"):
        weight = np.where(valid[:, None], np.exp(np.asarray(logits, np.float64)), 0.0)
    num_tokens, num_experts = weight.shape
    for _ in range(iterations):
        for e in range(num_experts):
            if weight[:, e].sum() > 0:
                weight[:, e] *= valid.sum() / num_experts / weight[:, e].sum()
        for t in range(num_tokens):
            if weight[t].sum() > 0:
                weight[t] /= weight[t].sum()
    return weight


@pytest.mark.parametrize("iterations", [1, 3, SINKHORN_ITERATIONS])
def test_plan_matches_the_loop(iterations):
    logits = 2 * normal(0, 24, 4)
    logits[:, 1] = -np.inf
    logits[4, :3] = -np.inf
    logits[6] = -np.inf
    valid = np.random.default_rng(1).random(24) < 0.7
    valid[[4, 6]] = True
    dirty = np.where(valid[:, None], logits, np.nan)
    expected = slow_plan(logits, iterations, valid)
    np.testing.assert_allclose(
        plan(dirty, iterations=iterations, valid=valid), expected, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(expected[~valid], 0)


@pytest.mark.parametrize("shape", [(32, 8), (256, 64)])
def test_plan_is_balanced(shape):
    share = shape[0] / shape[1]
    for seed in range(5):
        for iterations, scale, error in [(5, 1, 1e-3), (20, 2, 1e-5), (20, 4, 2e-2)]:
            result = np.asarray(plan(scale * normal(seed, *shape), iterations=iterations))
            np.testing.assert_allclose(result.sum(1), 1, rtol=1e-5)
            np.testing.assert_allclose(result.sum(0), share, rtol=error)


def test_plan_and_choice_ignore_a_constant_per_column():
    logits, constant = normal(2, 24, 4), 3 * normal(3, 4)
    np.testing.assert_allclose(plan(logits + constant), plan(logits), atol=1e-5)
    straight, shifted = route(logits, k=1), route(logits + constant, k=1)
    np.testing.assert_array_equal(straight.expert, shifted.expert)
    # The balance is that of the plan; the greedy choice of the shifted logits has none.
    assert loads(shifted.expert, 4).max() < loads(np.argmax(logits + constant, 1), 4).max()


def test_choice_is_by_the_plan_in_the_order_of_the_logits():
    logits = 2 * normal(4, 24, 4)
    routing = route(logits, k=2)
    expected = np.sort(np.argsort(-np.asarray(plan(logits)), axis=1)[:, :2])
    np.testing.assert_array_equal(np.sort(routing.expert), expected)
    chosen = np.take_along_axis(logits, np.asarray(routing.expert), axis=1)
    assert (np.diff(chosen, axis=1) <= 0).all()
    probs = jax.nn.softmax(logits)
    np.testing.assert_allclose(
        routing.gate, np.take_along_axis(probs, np.asarray(routing.expert), axis=1), rtol=1e-5
    )


def test_sinkhorn_survives_underflow():
    logits = 1e4 * normal(5, 24, 4)
    result, routing = np.asarray(plan(logits)), route(logits, k=2)
    assert np.isfinite(result).all() and np.isfinite(routing.gate).all()
    np.testing.assert_allclose(result.sum(1), 1, rtol=1e-5)
    assert all(len(set(row)) == 2 for row in np.asarray(routing.expert))
    # exp(-300) is 0 in float32, as is exp(-200), and yet the larger is the second choice. The
    # columns have the same logits in another order, so their factors are alike.
    symmetric = jnp.array([[0, -200, -300.0], [-300, 0, -200], [-200, -300, 0]])
    np.testing.assert_array_equal(route(symmetric, k=2).expert, [[0, 1], [1, 2], [2, 0]])


def test_sinkhorn_gradient_is_that_of_the_gates():
    # dL/dz_j = p_j (1[j chosen] a_j - sum over chosen i of p_i a_i), as if the choice were given.
    logits, a = normal(6, 24, 4), normal(7, 24, 4)
    expert = np.asarray(route(logits, k=2).expert)
    probs = np.asarray(jax.nn.softmax(logits))
    chosen = np.zeros_like(logits)
    np.put_along_axis(chosen, expert, 1, axis=1)
    expected = probs * (chosen * a - np.sum(chosen * probs * a, axis=1, keepdims=True))

    def loss(z):
        routing = route(z, k=2)
        return jnp.sum(routing.gate * jnp.take_along_axis(jnp.asarray(a), routing.expert, axis=1))

    np.testing.assert_allclose(jax.grad(loss)(logits), expected, atol=1e-6)


@pytest.mark.parametrize("iterations", [0, 1.5])
def test_iterations_out_of_range(iterations):
    for method in (sinkhorn_plan, functools.partial(sinkhorn, k=1)):
        with pytest.raises(ValueError, match=rf"iterations: got {iterations}; allowed: 1\.\."):
            method(jnp.zeros((3, 4)), iterations=iterations)


class TestRouters:
    def inputs(self, training, **others):
        key = jax.random.key(0) if training else None
        return RouterInputs(x=jnp.zeros((24, 3)), key=key, **others)

    @pytest.mark.parametrize("router", [BaseAssignment(k=2), Sinkhorn(k=2, iterations=7)])
    def test_balanced_in_training_and_greedy_in_evaluation(self, router):
        logits = normal(0, 24, 4) + np.arange(4, dtype=np.float32)
        valid = np.arange(24) < 20
        choose = jax.jit(lambda z, inputs: router.choose(z, inputs, {}, {}))
        train = choose(logits, self.inputs(True, valid=valid))
        evaluate = choose(logits, self.inputs(False, valid=valid))
        if isinstance(router, BaseAssignment):
            expected, gate = base(logits, k=2, valid=valid), jax.nn.sigmoid(logits)
        else:
            expected = route(logits, k=2, iterations=7, valid=valid)
            gate = jax.nn.softmax(logits)
        np.testing.assert_array_equal(train.expert, expected.expert)
        best = np.argsort(-logits, axis=1)[:, :2]
        np.testing.assert_array_equal(evaluate.expert[valid], best[valid])
        np.testing.assert_array_equal(evaluate.expert[~valid], 4)
        gate = np.take_along_axis(np.asarray(gate), best, axis=1)
        np.testing.assert_allclose(evaluate.gate[valid], gate[valid], rtol=1e-5)
        np.testing.assert_array_equal(evaluate.gate[~valid], 0)
        assert loads(train.expert, 4).max() < loads(evaluate.expert, 4).max()

    @pytest.mark.parametrize("router", [BaseAssignment(k=2), Sinkhorn(k=2)])
    def test_replay_is_the_same_in_training_and_evaluation(self, router):
        logits = normal(1, 24, 4) + np.arange(4, dtype=np.float32)
        chosen = jnp.asarray(np.argsort(normal(2, 24, 4), axis=1)[:, :2], jnp.int32)
        others = [self.inputs(training, chosen=chosen) for training in (True, False)]
        choose = jax.jit(lambda z, inputs: router.choose(z, inputs, {}, {}))
        train, evaluate = (choose(2 * logits, one) for one in others)
        jax.tree.map(np.testing.assert_array_equal, train, evaluate)
        np.testing.assert_array_equal(train.expert, chosen)

    @pytest.mark.parametrize("router", [BaseAssignment(k=1), Sinkhorn(k=1)])
    def test_a_whole_route(self, router):
        keys = jax.random.split(jax.random.key(0))
        x, kernel = jax.random.normal(keys[0], (24, 3)), jax.random.normal(keys[1], (3, 4))
        mask = jnp.array([True, True, False, True])
        inputs = RouterInputs(x, expert_mask=mask)
        routed = jax.jit(lambda kernel: router.route(inputs, {"kernel": kernel}, {}))(kernel)
        assert not (routed.choice.expert == 2).any()
        assert router.sees_future == "training"
        assert router.default_losses == CommonLosses(load_balance=0.0, z=0.0)


def test_no_tokens_at_all():
    assert base_assignment(jnp.zeros((0, 4)), k=2).expert.shape == (0, 2)
    assert sinkhorn(jnp.zeros((0, 4)), 2).expert.shape == (0, 2)
