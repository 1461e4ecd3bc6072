"""The one place that computes capacity and positions.

Axis legend: T tokens, K slots per token, E experts, k choices per token.
"""

import math
from fractions import Fraction
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from moe_jax.kernels.xla_rows import rank_in_expert
from moe_jax.routing import expert_counts

Priority = Literal["arrival", "first_choice", "gate"]
PRIORITIES: tuple[str, ...] = get_args(Priority)


def capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Assignments that each expert accepts: clip(ceil(k T factor / E), 1, T).

    The scope is whatever ``num_tokens`` counts (a group, a shard or the batch); the caller says.
    The factor is taken as the decimal number it is written as, so that 10 tokens at 1.1 give 11
    and not the 12 of a rounded product.

    Args:
      num_tokens: T >= 1.
      num_experts: E >= 1.
      k: choices per token, >= 1.
      factor: capacity factor, finite and > 0; 1.0 holds exactly a uniform load.

    Raises:
      ValueError: an argument out of range.
    """
    for name, value in (("num_tokens", num_tokens), ("num_experts", num_experts), ("k", k)):
        if int(value) != value or value < 1:
            raise ValueError(f"{name}: got {value!r}; allowed: integers >= 1")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"capacity factor: got {factor!r}; allowed: finite numbers > 0")
    exact = Fraction(str(float(factor))) * k * num_tokens / num_experts
    return min(max(math.ceil(exact), 1), int(num_tokens))


def positions(
    expert: jax.Array,
    num_experts: int,
    *,
    priority: Priority,
    gate: jax.Array | None = None,
) -> jax.Array:
    """Rank of each assignment among those of its expert, in order of priority.

    An assignment is kept under a capacity C when its position is < C.

    Args:
      expert: i32[T, K]; ``num_experts`` marks an empty slot.
      num_experts: E.
      priority: "arrival": token by token, a token's choices in order. "first_choice": the first
        choices of all tokens in order, then the second (GShard). "gate": as first_choice, with
        tokens by falling largest gate, equal ones in order (batch-prioritised routing, V-MoE).
      gate: f32[T, K], needed by "gate" only.

    Returns:
      i32[T, K]. Empty slots get T*K, which no capacity admits. Memory and time grow with T*K log
      T*K and not with E.

    Raises:
      ValueError: unknown priority, or "gate" without gates.
    """
    if priority not in PRIORITIES:
        raise ValueError(f"priority: got {priority!r}; allowed: {', '.join(PRIORITIES)}")
    if priority == "gate" and gate is None:
        raise ValueError('gate: got None; priority "gate" needs the gates f32[T, K]')
    num_tokens, num_slots = expert.shape
    if priority == "arrival":
        rank = rank_in_expert(expert.ravel(), num_experts).reshape(expert.shape)
    elif priority == "first_choice":
        rank = rank_in_expert(expert.T.ravel(), num_experts).reshape(num_slots, num_tokens).T
    else:
        order = jnp.argsort(-jnp.max(gate, axis=1), stable=True)
        by_gate = positions(expert[order], num_experts, priority="first_choice")
        rank = jnp.zeros_like(by_gate).at[order].set(by_gate, unique_indices=True)
    return jnp.where(expert < num_experts, rank, expert.size).astype(jnp.int32)


def drop_over_capacity(
    expert: jax.Array,
    gate: jax.Array,
    position: jax.Array,
    num_experts: int,
    capacity: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Empties the slots whose position is past the capacity; None: nobody's is.

    Returns:
      expert i32[T, K] and gate f32[T, K] of the slots that are left, and i32[E], the drop counts.
    """
    if capacity is None:
        return expert, gate, jnp.zeros(num_experts, jnp.int32)
    over = (position >= capacity) & (expert < num_experts)
    dropped = expert_counts(jnp.where(over, expert, num_experts), num_experts)
    return jnp.where(over, num_experts, expert), jnp.where(over, 0.0, gate), dropped
