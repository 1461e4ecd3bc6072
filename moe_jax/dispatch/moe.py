"""Tokens to experts and back, given a routing.

Axis legend: T tokens, K slots per token, E experts, C capacity, d width, f expert width.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from moe_jax.dispatch.capacity import Priority, positions
from moe_jax.dispatch.dropless import dropless_moe
from moe_jax.dispatch.einsum import einsum_moe
from moe_jax.dispatch.feed_forward import Activation, activation_function, check_experts
from moe_jax.dispatch.sorted import sorted_moe
from moe_jax.routing import TokenChoice, expert_counts

Implementation = Literal["dropless", "sorted", "einsum"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def moe(
    x: jax.Array,
    routing: TokenChoice,
    experts: dict[str, jax.Array],
    *,
    implementation: Implementation = "dropless",
    capacity: int | None = None,
    priority: Priority = "arrival",
    activation: Activation = "gelu",
) -> tuple[jax.Array, jax.Array]:
    """Sum over each token's slots of gate times that expert's output.

    The capacity says who is dropped, the implementation only how the rest is computed: all three
    give the same output and the same gradients. ``dropless`` and ``sorted`` define their gradients
    themselves and support reverse mode once; ``einsum`` supports every transformation, but a NaN or
    infinite number in a token that is routed reaches all tokens there.

    Args:
      x: float[T, d].
      routing: whose slots are obeyed, through ``expert`` (in [0, E], no expert twice in a token)
        and ``gate``. Gradients reach the router through ``gate``.
      experts: weights "w_in" [E, d, f], "w_out" [E, f, d], optional "w_gate" [E, d, f] (GLU),
        "b_in" [E, f], "b_out" [E, d].
      implementation: "dropless": work for the assignments there are. "sorted": work for E*C rows.
        "einsum": arrays of T*E*C.
      capacity: assignments that an expert accepts, in order of priority; the others are dropped
        and add exactly 0. None: nobody is dropped (for sorted and einsum C is then T, at E/k
        times the work).
      priority: see ``positions``.
      activation: a callable (elementwise), or a name in jax.nn with its defaults.

    Returns:
      y float[T, d] of x's dtype, 0 for tokens without an expert, and the drop counts i32[E]: the
      assignments that each expert dropped.

    Raises:
      ValueError: unknown implementation, priority or activation; capacity < 1; shapes that do not
        fit.
    """
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: got {implementation!r}; allowed: {allowed}")
    if capacity is not None and (int(capacity) != capacity or capacity < 1):
        raise ValueError(f"capacity: got {capacity!r}; allowed: integers >= 1, or None")
    x, experts = jnp.asarray(x), jax.tree.map(jnp.asarray, experts)
    expert, gate = jnp.asarray(routing.expert), jnp.asarray(routing.gate)
    if x.ndim != 2 or expert.shape != gate.shape or expert.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"got x {x.shape}, routing.expert {expert.shape}, routing.gate {gate.shape};"
            " allowed: [T, d], [T, K], [T, K]"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got dtype {x.dtype}; allowed: floating-point numbers")
    num_experts, _, _ = check_experts(experts, x.shape[1])
    if jnp.ndim(routing.probs) == 2 and routing.probs.shape[1] != num_experts:
        routed = routing.probs.shape[1]
        raise ValueError(
            f"experts: got {num_experts}; allowed: {routed}, as many as the router has"
        )
    position = positions(expert, num_experts, priority=priority, gate=gate)
    expert, gate, dropped = _drop(expert, gate, position, num_experts, capacity)
    compute = {"dropless": dropless_moe, "sorted": sorted_moe, "einsum": einsum_moe}
    y = compute[implementation](
        x,
        expert,
        gate,
        position,
        experts,
        capacity=x.shape[0] if capacity is None else min(int(capacity), x.shape[0]),
        activation=activation_function(activation),
    )
    return y.astype(x.dtype), dropped


def _drop(expert, gate, position, num_experts, capacity):
    """Empties the slots whose position is past the capacity; counts them per expert."""
    if capacity is None:
        return expert, gate, jnp.zeros(num_experts, jnp.int32)
    over = (position >= capacity) & (expert < num_experts)
    dropped = expert_counts(jnp.where(over, expert, num_experts), num_experts)
    return jnp.where(over, num_experts, expert), jnp.where(over, 0.0, gate), dropped
