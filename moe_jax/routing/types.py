"""What a router returns.

Axis legend (used in every module of the package):
  T  tokens        d  model width      E  experts       k  choices per token
  K  slots per token (K >= k)          C  capacity      f  expert width
  G  sequences, of T/G tokens each     S  slots per expert
"""

import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenChoice(NamedTuple):
    """Each token's chosen experts and their weights.

    A slot that holds nobody (an invalid token, a logit of -inf, a dropped assignment) has
    ``expert == E`` and ``gate == 0`` exactly. Slots are sorted by falling logit.

    Attributes:
      expert: i32[T, K], in [0, E]; E marks an empty slot.
      gate: f32[T, K], >= 0; the weight of the expert's output. NaN only where the logits are NaN or
        +inf, so that a broken router does not go unseen.
      logits: f32[T, E], the router logits that were routed on.
      probs: f32[T, E], softmax of the logits over all experts; 0 for invalid tokens.
    """

    expert: jax.Array
    gate: jax.Array
    logits: jax.Array
    probs: jax.Array


class ExpertChoice(NamedTuple):
    """Each expert's chosen tokens and their weights.

    Attributes:
      token: i32[E, C], in [0, T]; T marks an empty slot, whose gate is 0. Sorted by falling score.
      gate: f32[E, C], >= 0; the weight of the expert's output for that token.
      probs: f32[T, E], softmax of the logits over all experts; 0 for invalid tokens.
    """

    token: jax.Array
    gate: jax.Array
    probs: jax.Array


class SoftChoice(NamedTuple):
    """Slots that hold weighted means of tokens, and tokens that take weighted means of slots.

    Attributes:
      dispatch: f32[G, T/G, E, S], or [T, E, S] for a single sequence; over the tokens of a sequence
        the weights of a slot sum to 1.
      combine: of the same shape; over the slots of all experts a token's weights sum to 1. Invalid
        tokens have 0 in both.
      probs: f32[T, E], a token's combine weights summed over the slots of each expert.
    """

    dispatch: jax.Array
    combine: jax.Array
    probs: jax.Array


class ExpertMerge(NamedTuple):
    """Weights of a merged expert for each sequence.

    Attributes:
      weight: f32[G, E], >= 0, summing to 1 over the experts; 0 for a sequence without valid tokens.
      valid: bool[T]; the output of invalid tokens is 0.
      probs: f32[T, E], softmax of the logits over all experts; 0 for invalid tokens.
    """

    weight: jax.Array
    valid: jax.Array
    probs: jax.Array


class ConstantGateWarning(UserWarning):
    """The gate does not depend on the router, which so gets no gradient through the output."""


Choice = TokenChoice | ExpertChoice | SoftChoice | ExpertMerge


def check_valid(valid: jax.Array | None, num_tokens: int) -> jax.Array:
    """``valid`` as bool[T]; all True for None.

    Raises:
      ValueError: another shape than [T].
    """
    if valid is None:
        return jnp.ones(num_tokens, bool)
    valid = jnp.asarray(valid)
    if valid.shape != (num_tokens,):
        raise ValueError(f"valid: got shape {valid.shape}; allowed: {(num_tokens,)}, as tokens")
    return valid.astype(bool)


def check_logits(logits: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The logits as f32[T, E] and ``valid`` as bool[T].

    Raises:
      ValueError: logits not [T, E] with E >= 1, valid not [T].
    """
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: got shape {logits.shape}; allowed: [T, E] with E >= 1")
    return logits.astype(jnp.float32), check_valid(valid, logits.shape[0])


def check_count(name: str, value: int, highest: int, what: str) -> int:
    """``value`` as an int in 1..highest; ``what`` says what ``highest`` is.

    Raises:
      ValueError: it is not.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not 1 <= value <= highest:
        raise ValueError(f"{name}: got {value!r}; allowed: 1..{highest} ({what})")
    return int(value)


def check_slots(max_active: int | None, num_experts: int) -> int:
    """K, the slots of a token that may have any number of experts: all E of them for None.

    Raises:
      ValueError: not in 1..E.
    """
    slots = num_experts if max_active is None else max_active
    return check_count("max_active", slots, num_experts, "the number of experts")


def check_whole(name: str, value: int, *, at_least: int) -> None:
    """Checks that ``value`` is a whole number >= at_least.

    Raises:
      ValueError: it is not.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < at_least:
        raise ValueError(f"{name}: got {value!r}; allowed: whole numbers >= {at_least}")


def check_chosen(chosen: jax.Array, rows: int, name: str) -> jax.Array:
    """A choice to be repeated, as i32[rows, any number]; ``name`` says what the rows are.

    Raises:
      ValueError: another shape, or no whole numbers.
    """
    chosen = jnp.asarray(chosen)
    fits = chosen.ndim == 2 and chosen.shape[0] == rows
    if not fits or not jnp.issubdtype(chosen.dtype, jnp.integer):
        got = f"{chosen.dtype}{list(chosen.shape)}"
        raise ValueError(f"chosen: got {got}; allowed: int[{rows}, slots], a row for each {name}")
    return chosen.astype(jnp.int32)


def check_number(
    name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf
) -> None:
    """Checks that a Python number is finite and in range.

    Raises:
      ValueError: it is not.
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > above and value >= at_least):
        bound = f"> {above:g}" if above > -math.inf else f">= {at_least:g}"
        raise ValueError(f"{name}: got {value!r}; allowed: numbers {bound}")


def expert_counts(expert: jax.Array, num_experts: int) -> jax.Array:
    """Number of assignments per expert: i32[E] from expert i32[...], empty slots not counted."""
    counts = jnp.zeros(num_experts, jnp.int32)
    return counts.at[jnp.ravel(expert)].add(1, mode="drop")


def dense_gates(routing: TokenChoice | ExpertChoice) -> jax.Array:
    """The gates as a matrix f32[T, E], 0 where an expert does not take a token."""
    num_tokens, num_experts = routing.probs.shape
    zeros = jnp.zeros((num_tokens, num_experts), jnp.float32)
    if isinstance(routing, ExpertChoice):
        expert = jnp.arange(num_experts)[:, None]
        return zeros.at[routing.token, expert].add(routing.gate, mode="drop")
    token = jnp.arange(num_tokens)[:, None]
    return zeros.at[token, routing.expert].add(routing.gate, mode="drop")
