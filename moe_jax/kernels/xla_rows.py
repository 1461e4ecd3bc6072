"""Rows to and from tokens, and routing, as XLA does them well: gathers and one sort.

Axis legend: T tokens, K slots, E experts, k choices, N rows, d width.
"""

import jax
import jax.numpy as jnp

from moe_jax.routing import expert_counts, softmax_top_k


def gather(x, token, *, scale=None):
    """See ``backend.Gather``."""
    rows = _take(x, token)
    if scale is None:
        return rows
    # Not 0 * scale, which is NaN where the scale is.
    return jnp.where((token < x.shape[0])[:, None], rows * scale[:, None], 0).astype(x.dtype)


def combine(rows, row, *, gate=None):
    """See ``backend.Combine``."""
    total = sum(_term(rows, row[:, j], None if gate is None else gate[:, j]) for j in _slots(row))
    return total.astype(rows.dtype)


def _term(rows, row, gate):
    term = _take(rows, row).astype(jnp.promote_types(rows.dtype, jnp.float32))
    if gate is None:
        return term
    return jnp.where((row < rows.shape[0])[:, None], term * gate[:, None], 0)


def gate_gradient(cotangent, rows, row):
    """See ``backend.GateGradient``."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    cotangent = cotangent.astype(wide)

    def product(j):
        dot = jnp.sum(cotangent * _take(rows, row[:, j]).astype(wide), axis=-1)
        return jnp.where(row[:, j] < rows.shape[0], dot, 0)

    return jnp.stack([product(j) for j in _slots(row)], axis=1)


def route(logits, k, valid):
    """See ``backend.Route``."""
    routing = softmax_top_k(logits, k, valid=valid)
    num_experts = logits.shape[1]
    flat = routing.expert.ravel()
    rank = rank_in_expert(flat, num_experts).reshape(routing.expert.shape)
    position = jnp.where(routing.expert < num_experts, rank, flat.size)
    return routing.expert, routing.gate, position, expert_counts(routing.expert, num_experts)


def rank_in_expert(expert: jax.Array, num_experts: int) -> jax.Array:
    """i32[N]: how many earlier entries of expert i32[N], in [0, E], name the same expert."""
    order = _stable_order(expert, num_experts)
    counts = expert_counts(expert, num_experts + 1)
    start = jnp.cumsum(counts) - counts
    rank_in_order = jnp.arange(expert.size, dtype=jnp.int32) - start[expert[order]]
    return jnp.zeros_like(rank_in_order).at[order].set(rank_in_order, unique_indices=True)


def _stable_order(expert, num_experts):
    """argsort(expert), equal ones in order. On CPU one array sorts much faster than two."""
    if (num_experts + 1) * expert.size >= 2**31:
        return jnp.argsort(expert, stable=True)
    place = jnp.arange(expert.size, dtype=jnp.int32)
    return jnp.sort(expert.astype(jnp.int32) * expert.size + place) % expert.size


def _slots(row):
    return range(row.shape[1])


def _take(array, index):
    """array[index] along the first axis, 0 where the index is past the end."""
    return array.at[index].get(mode="fill", fill_value=0)
