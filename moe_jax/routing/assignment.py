"""Routers that balance the experts while they choose: by exact assignment, by Sinkhorn's plan.

What a token gets depends on all tokens of the call, later ones included, so both balance in
training alone; in evaluation their Router is greedy.

Axis legend: T tokens, E experts, k choices, K slots; N = T + E rows, the tokens and E fillers.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.routing.router import CommonLosses, Router
from moe_jax.routing.token_choice import masked_softmax, router_probs, select, softmax_top_k, take
from moe_jax.routing.types import TokenChoice, check_count, check_logits, expert_counts

# Measured, the worst of 40 draws with T >= 32 and T >= 4 E: columns of normal logits of standard
# deviation 1 are within 1e-3 of their share after 5 iterations, those of deviation 2 within 1e-5
# after 20. Training makes logits larger, so what suffices at its start would not for long.
SINKHORN_ITERATIONS = 20

# Sweeps of ``_balancing_prices``. Measured: further ones take longer than the moves that they save.
_MAX_SWEEPS = 3


def base_assignment(
    logits: jax.Array,
    *,
    k: int = 1,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Gives each token one expert, balanced, so that the sum of the chosen logits is the largest.

    Source: BASE layers, Lewis et al. 2021 (arXiv:2103.16716). With n valid tokens no expert takes
    more than ceil(n / E), so each takes exactly n / E where E divides n. The optimum is exact up to
    rounding, about 1e-6 of the spread of the logits.

    k > 1 is our generalisation: k such assignments one after the other, in each of which the
    experts that a token already has are forbidden. It is the optimum of each round, not of all
    together.

    Args:
      logits: float[T, E]; cast to float32. An expert of logit -inf is forbidden: as few tokens as
        balance allows are assigned to such, and they get an empty slot. A logit that is NaN or +inf
        counts as the largest finite one in the choice, and stays what it is in the gate.
      k: choices per token, 1 <= k <= E.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead of choosing (E: empty slot).

    Returns:
      TokenChoice with K = k and gate sigmoid(logit) of the chosen expert. The gradient goes through
      the gate alone.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    if chosen is not None:
        return _sigmoid_gates(logits, *select(logits, k, valid, chosen), valid)

    def assign(taken, _):
        allowed = jnp.where(taken, -jnp.inf, jax.lax.stop_gradient(logits))
        return taken | _mark(_balanced_experts(allowed, valid), logits.shape[1]), None

    # -inf in the round's logits and not in these: an expert that a token has had before.
    nothing = jnp.zeros(logits.shape, bool)
    taken, _ = jax.lax.scan(assign, nothing, length=k)
    return _sigmoid_gates(logits, *select(jnp.where(taken, logits, -jnp.inf), k, valid), valid)


def sinkhorn_plan(
    logits: jax.Array, *, iterations: int = SINKHORN_ITERATIONS, valid: jax.Array | None = None
) -> jax.Array:
    """The balanced plan closest to exp(logits): rows sum to 1, columns to n / E.

    Source: Clark et al. 2022 (arXiv:2202.01169); the entropic optimal transport between n valid
    tokens and E experts. An iteration scales the columns, then the rows, so that the rows are exact
    and the columns converge: with the default to within 1e-5 of n / E (relative) for normal logits
    of standard deviation up to 2, to within 2e-2 for deviation 4 (T >= 32 and T >= 4 E).

    Args:
      logits: float[T, E]; cast to float32. -inf entries are 0 in the plan.
      iterations: 1 to 10000.
      valid: bool[T]; the rows of invalid tokens are 0. None: all are valid.

    Returns:
      f32[T, E]. A row or a column of -inf alone is 0; the other columns share its part.

    Raises:
      ValueError: logits not [T, E], iterations out of range, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    logits = jnp.where(valid[:, None], logits, -jnp.inf)
    return masked_softmax(logits + _column_scale(logits, iterations, valid), logits != -jnp.inf)


def sinkhorn(
    logits: jax.Array,
    k: int,
    *,
    iterations: int = SINKHORN_ITERATIONS,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """Takes the k largest entries of the balanced plan; the gates are the router probabilities.

    Source: S-BASE, Clark et al. 2022 (arXiv:2202.01169). The plan is balanced and a choice by it is
    nearly so; capacity has to cut the rest.

    Args:
      logits: float[T, E]; cast to float32. An expert of logit -inf is never chosen. Equal entries
        of the plan: the lowest index wins.
      k: choices per token, 1 <= k <= E.
      iterations: of ``sinkhorn_plan``.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead of the k best (E: empty slot).

    Returns:
      TokenChoice with K = k and gate softmax(logits) of the chosen experts, not renormalised. Slots
      are sorted by falling logit. The gradient goes through the gates alone.

    Raises:
      ValueError: logits not [T, E], k or iterations out of range, valid not [T].
    """
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    if chosen is None:
        fixed = jnp.where(valid[:, None], jax.lax.stop_gradient(logits), -jnp.inf)
        # The log plan less a constant of each row: entries that underflow keep their order.
        expert, _ = select(fixed + _column_scale(fixed, iterations, valid), k, valid)
        chosen, _ = select(jnp.where(_mark(expert, logits.shape[1]), fixed, -jnp.inf), k, valid)
    return softmax_top_k(logits, k, valid=valid, chosen=chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseAssignment(Router):
    """``base_assignment`` in training; in evaluation the k largest logits, with the same gate."""

    sees_future = "training"
    can_leave_out_experts = False  # the share of those left out would go to nobody
    default_losses = CommonLosses(load_balance=0.0, z=0.0)

    def choose(self, logits, inputs, weights, state):
        del weights, state
        if inputs.key is not None:
            return base_assignment(logits, k=self.k, valid=inputs.valid, chosen=inputs.chosen)
        logits, valid = check_logits(logits, inputs.valid)
        k = check_count("k", self.k, logits.shape[1], "the number of experts")
        return _sigmoid_gates(logits, *select(logits, k, valid, inputs.chosen), valid)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn(Router):
    """``sinkhorn`` in training; in evaluation the k largest logits, with the same gate.

    Attributes:
      iterations: of ``sinkhorn_plan``.
    """

    iterations: int = SINKHORN_ITERATIONS

    sees_future = "training"
    default_losses = CommonLosses(load_balance=0.0, z=0.0)

    def choose(self, logits, inputs, weights, state):
        del weights, state
        others = {"valid": inputs.valid, "chosen": inputs.chosen}
        if inputs.key is None:
            return softmax_top_k(logits, self.k, **others)
        return sinkhorn(logits, self.k, iterations=self.iterations, **others)


def _sigmoid_gates(
    logits: jax.Array, expert: jax.Array, used: jax.Array, valid: jax.Array
) -> TokenChoice:
    """The choice of expert i32[T, K], where used bool[T, K], with gate sigmoid(logit)."""
    # Masked before the sigmoid as well: NaN of an invalid token must not reach the gradient.
    gate = jnp.where(used, jax.nn.sigmoid(jnp.where(used, take(logits, expert), 0.0)), 0.0)
    return TokenChoice(expert, gate, logits, router_probs(logits, valid))


def _mark(expert: jax.Array, num_experts: int) -> jax.Array:
    """bool[T, E], True for the experts in i32[T] or i32[T, K]; an empty slot marks nothing."""
    expert = expert[:, None] if expert.ndim == 1 else expert
    return jnp.any(expert[:, :, None] == jnp.arange(num_experts), axis=1)


def _column_scale(logits: jax.Array, iterations: int, valid: jax.Array) -> jax.Array:
    """Logarithm of the factors f32[E] that balance exp(logits), whose invalid rows are -inf."""
    iterations = check_count("iterations", iterations, 10_000, "more change nothing in float32")
    share = jnp.log(jnp.sum(valid) / logits.shape[1])

    def log_sum(values, axis):
        total = jax.nn.logsumexp(values, axis=axis, keepdims=True)
        return jnp.where(total == -jnp.inf, 0.0, total)  # nothing there, so nothing to scale

    def iterate(_, column):
        return share - log_sum(logits - log_sum(logits + column, 1), 0)

    # Rows, which come last in an iteration, need no factor of their own: a softmax is one.
    first = share - log_sum(logits, 0)
    return jax.lax.fori_loop(1, iterations, iterate, first)[0]


class _Problem(NamedTuple):
    """An assignment problem in which every expert takes exactly ``capacity`` rows.

    Fillers, to which all experts are alike, make the number of rows a multiple of E.

    Attributes:
      scores: f32[N, E], finite, of which the total is to be the largest.
      active: bool[N], the rows that are assigned.
      capacity: i32[].
      tolerance: f32[], differences of scores that are rounding.
    """

    scores: jax.Array
    active: jax.Array
    capacity: jax.Array
    tolerance: jax.Array


def _balanced_experts(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """The experts i32[T] of the balanced assignment of largest total; E for invalid tokens.

    Prices first, which most often leave a few tokens too many or none; the exact method of
    successive shortest paths moves those.
    """
    problem = _make_problem(logits, valid)
    prices = _balancing_prices(problem)
    expert = _settle_ties(problem, prices)
    num_experts = logits.shape[1]
    load = expert_counts(expert, num_experts)
    most = problem.scores.shape[0]  # a move fills one place, so more cannot be needed

    def unbalanced(carry):
        _, load, moves = carry
        return jnp.any(load > problem.capacity) & (moves < most)

    def move(carry):
        expert, load, moves = carry
        start, end, successor = _cheapest_path(problem, expert, load)
        expert = _move_along(problem, expert, start, end, successor)
        return expert, load.at[start].add(-1).at[end].add(1), moves + 1

    expert, _, _ = jax.lax.while_loop(unbalanced, move, (expert, load, jnp.int32(0)))
    return expert[: logits.shape[0]]


def _make_problem(logits: jax.Array, valid: jax.Array) -> _Problem:
    """The problem of logits f32[T, E], where -inf is worse than any way around it."""
    num_experts = logits.shape[1]
    number = jnp.sum(valid, dtype=jnp.int32)
    capacity = -(-number // num_experts)
    finite = jnp.isfinite(logits) & valid[:, None]
    low = jnp.min(logits, initial=jnp.inf, where=finite)
    high = jnp.max(logits, initial=-jnp.inf, where=finite)
    low, high = (jnp.where(jnp.any(finite), bound, 0.0) for bound in (low, high))
    never = low - num_experts * (high - low + 1.0)
    scores = jnp.where(finite, logits, jnp.where(logits == -jnp.inf, never, high))
    # A constant per row changes no choice; without it differences are resolved better.
    scores = scores - jnp.max(scores, axis=1, keepdims=True)
    spread = -jnp.min(scores, initial=0.0, where=finite)
    return _Problem(
        jnp.concatenate([scores, jnp.zeros((num_experts, num_experts))]),
        jnp.concatenate([valid, jnp.arange(num_experts) < capacity * num_experts - number]),
        capacity,
        1e-6 * spread,
    )


def _balancing_prices(problem: _Problem) -> jax.Array:
    """Prices f32[E] at which the rows' best experts, by score less price, are nearly balanced.

    Coordinate descent on the dual: expert by expert, the price at which just ``capacity`` rows
    prefer it to all others.
    """
    num_experts = problem.scores.shape[1]

    def sweep(carry):
        prices, sweeps = carry
        return jax.lax.fori_loop(0, num_experts, reprice, prices), sweeps + 1

    def reprice(e, prices):
        gain = problem.scores - prices
        others = jnp.max(jnp.where(jnp.arange(num_experts) == e, -jnp.inf, gain), axis=1)
        bid = jnp.sort(jnp.where(problem.active, others - problem.scores[:, e], jnp.inf))
        last = problem.capacity
        return prices.at[e].set(-0.5 * (bid[last - 1] + bid[last]))

    def unbalanced(carry):
        prices, sweeps = carry
        load = expert_counts(_best_expert(problem, prices), num_experts)
        return jnp.any(load > problem.capacity) & (sweeps < _MAX_SWEEPS)

    return jax.lax.while_loop(unbalanced, sweep, (jnp.zeros(num_experts), jnp.int32(0)))[0]


def _best_expert(problem: _Problem, prices: jax.Array) -> jax.Array:
    """Each row's best expert i32[N] by score less price, E for rows that are not active.

    No other assignment of the same load has a larger total: the prices of a load are a constant.
    """
    best = jnp.argmax(problem.scores - prices, axis=1)
    return jnp.where(problem.active, best, problem.scores.shape[1]).astype(jnp.int32)


def _settle_ties(problem: _Problem, prices: jax.Array) -> jax.Array:
    """``_best_expert``, but rows to which other experts are as good leave those that overflow.

    Without it equal tokens, or a router that starts at zero, would need a path for each row.
    """
    num_experts = problem.scores.shape[1]
    gain = problem.scores - prices
    as_good = gain >= jnp.max(gain, axis=1, keepdims=True) - problem.tolerance
    expert = _best_expert(problem, prices)

    def unbalanced(carry):
        _, load, row = carry
        return jnp.any(load > problem.capacity) & (row < problem.scores.shape[0])

    def settle(carry):
        expert, load, row = carry
        old = expert[row]
        new = jnp.argmin(jnp.where(as_good[row], load, problem.scores.shape[0])).astype(jnp.int32)
        overflows = load.at[old].get(mode="fill", fill_value=0) > problem.capacity
        moves = (overflows & (load[new] < problem.capacity)).astype(jnp.int32)
        load = load.at[old].add(-moves, mode="drop").at[new].add(moves)
        return expert.at[row].set(jnp.where(moves, new, old)), load, row + 1

    start = (expert, expert_counts(expert, num_experts), jnp.int32(0))
    return jax.lax.while_loop(unbalanced, settle, start)[0]


def _cheapest_path(problem: _Problem, expert: jax.Array, load: jax.Array):
    """The cheapest path from an expert that overflows to one with room.

    Bellman-Ford from all overflowing experts at once. An edge from e to f costs what the row of e
    loses that loses least by changing to f.

    Returns:
      start and end i32[], and successor i32[E] of the experts on the path.
    """
    num_experts = problem.scores.shape[1]
    itself = jnp.arange(num_experts, dtype=jnp.int32)
    loss = take(problem.scores, expert[:, None]) - problem.scores
    cost = jax.ops.segment_min(loss, expert, num_experts)

    def changing(carry):
        _, _, step, changed = carry
        return changed & (step < num_experts - 1)

    def relax(carry):
        distance, before, step, _ = carry
        through = distance[:, None] + cost
        # A gain within the rounding is none, or experts could gain from each other in a circle.
        nearer = jnp.min(through, axis=0) < distance - problem.tolerance
        distance = jnp.where(nearer, jnp.min(through, axis=0), distance)
        before = before.at[step].set(jnp.where(nearer, jnp.argmin(through, axis=0), itself))
        return distance, before, step + 1, jnp.any(nearer)

    distance = jnp.where(load > problem.capacity, 0.0, jnp.inf)
    before = jnp.broadcast_to(itself, (num_experts, num_experts))
    carry = (distance, before, jnp.int32(0), True)
    distance, before, steps, _ = jax.lax.while_loop(changing, relax, carry)
    end = jnp.argmin(jnp.where(load < problem.capacity, distance, jnp.inf)).astype(jnp.int32)

    def back(i, carry):
        expert, successor = carry
        previous = before[steps - 1 - i, expert]
        # Only the last visit of an expert counts, so a path that rounding sends in a circle is cut.
        last = successor[previous] == num_experts
        return previous, successor.at[previous].set(jnp.where(last, expert, successor[previous]))

    successor = jnp.full(num_experts, num_experts, jnp.int32).at[end].set(end)
    start, successor = jax.lax.fori_loop(0, steps, back, (end, successor))
    return start, end, successor


def _move_along(problem: _Problem, expert: jax.Array, start, end, successor) -> jax.Array:
    """The experts after each expert of the path has passed its cheapest row on."""

    def step(carry):
        expert, at = carry
        to = successor[at]
        loss = problem.scores[:, at] - problem.scores[:, to]
        row = jnp.argmin(jnp.where(before == at, loss, jnp.inf))
        return expert.at[row].set(to), to

    before = expert
    return jax.lax.while_loop(lambda carry: carry[1] != end, step, (expert, start))[0]
