"""Tokens to experts and back, given a routing.

Axis legend: T tokens, K slots per token, E experts, C capacity, d width, f expert width.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from moe_jax.dispatch.capacity import PRIORITIES, Priority, drop_over_capacity, positions
from moe_jax.dispatch.dropless import dropless_moe
from moe_jax.dispatch.einsum import einsum_moe
from moe_jax.dispatch.expert_parallel import ExpertParallel, expert_parallel_moe
from moe_jax.dispatch.expert_rows import expert_choice_moe, merged_moe, soft_moe
from moe_jax.dispatch.feed_forward import Activation, activation_function, check_experts
from moe_jax.dispatch.sorted import sorted_moe
from moe_jax.kernels import select
from moe_jax.kernels.api import check_name
from moe_jax.kernels.backend import check_index
from moe_jax.routing import Choice, ExpertChoice, ExpertMerge, SoftChoice

Implementation = Literal["dropless", "sorted", "einsum"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def moe(
    x: jax.Array,
    routing: Choice,
    experts: dict[str, jax.Array],
    *,
    implementation: Implementation = "dropless",
    capacity: int | None = None,
    priority: Priority = "arrival",
    activation: Activation = "gelu",
    position: jax.Array | None = None,
    backend: str | None = None,
    parallel: ExpertParallel | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum over each token's experts of gate times that expert's output.

    For a TokenChoice the capacity says who is dropped, the implementation only how the rest is
    computed: all three give the same output and the same gradients. ``dropless`` and ``sorted``
    define their gradients themselves and support reverse mode once; ``einsum`` supports every
    transformation, but a NaN or infinite number in a token that is routed reaches all tokens there.

    Args:
      x: float[T, d].
      routing: a TokenChoice, whose slots are obeyed, through ``expert`` (in [0, E], no expert twice
        in a token) and ``gate``; gradients reach the router through ``gate``. Or another choice of
        ``moe_jax.routing``, each of which is computed in one way whatever the implementation.
      experts: weights "w_in" [E, d, f], "w_out" [E, f, d], optional "w_gate" [E, d, f] (GLU),
        "b_in" [E, f], "b_out" [E, d].
      implementation: "dropless": work for the assignments there are. "sorted": work for E*C rows.
        "einsum": arrays of T*E*C.
      capacity: assignments that an expert accepts, in order of priority; the others are dropped
        and add exactly 0. None: nobody is dropped (for sorted and einsum C is then T, at E/k
        times the work). It must be None for other choices, which fix the rows of every expert.
      priority: see ``positions``.
      activation: a callable (elementwise), or a name in jax.nn with its defaults.
      position: i32[T, K], the positions of the assignments where they are known already, as from
        ``moe_jax.kernels.fused_router``; ``priority`` then says nothing. They must be those of
        exactly this ``expert``, which is not checked.
      backend: a name of ``moe_jax.kernels.BACKENDS``, who computes; None: the best for the device,
        which ``moe_jax.kernels.explain`` names. Dropless has it do everything, sorted the moves of
        rows; einsum and choices that are not a TokenChoice are XLA's, whatever is named here.
      parallel: how tokens and experts are spread over the mesh of ``jax.set_mesh``. None: they are
        not, or XLA finds out, which it must for einsum and for choices that are not a TokenChoice,
        whatever is said here. With capacity_scope "shard" the capacity is that of a shard.

    Returns:
      y float[T, d] of x's dtype, 0 for tokens without an expert, and the drop counts i32[E]: the
      assignments that each expert dropped.

    Raises:
      ValueError: unknown implementation, priority, activation or backend; capacity < 1; shapes
        that do not fit.
    """
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: got {implementation!r}; allowed: {allowed}")
    if priority not in PRIORITIES:
        raise ValueError(f"priority: got {priority!r}; allowed: {', '.join(PRIORITIES)}")
    check_name(backend)
    _check_capacity(capacity)
    x, experts = jnp.asarray(x), jax.tree.map(jnp.asarray, experts)
    num_experts = _check(x, routing, experts)
    activation = activation_function(activation)
    by_expert = {ExpertChoice: expert_choice_moe, SoftChoice: soft_moe, ExpertMerge: merged_moe}
    if type(routing) in by_expert:
        if capacity is not None:
            name = type(routing).__name__
            raise ValueError(f"capacity: got {capacity!r}; allowed: None with {name}")
        y = by_expert[type(routing)](x, routing, experts, activation=activation)
        return y, jnp.zeros(num_experts, jnp.int32)
    expert, gate = _integers("routing.expert", routing.expert), jnp.asarray(routing.gate)
    check_index(expert.size, "assignments T*K")
    select_backend = functools.partial(select, _dtype(x, experts), experts["w_in"].shape[1:])
    if implementation == "einsum":
        if parallel is not None and parallel.capacity_scope == "shard" and capacity is not None:
            raise ValueError("parallel.capacity_scope: got 'shard'; allowed with einsum: batch")
        parallel, backend = None, select_backend(None)  # XLA's on every device
    else:
        backend = select_backend(backend)
    options = dict(activation=activation, backend=backend)
    compute = {"dropless": dropless_moe, "sorted": sorted_moe, "einsum": einsum_moe}[implementation]
    if parallel is not None:
        return expert_parallel_moe(
            x,
            expert,
            gate,
            experts,
            parallel=parallel,
            compute=compute,
            capacity=None if capacity is None else int(capacity),
            priority=priority,
            **options,
        )
    position = _position(position, expert, gate, num_experts, priority)
    expert, gate, dropped = drop_over_capacity(expert, gate, position, num_experts, capacity)
    most = x.shape[0] if capacity is None else min(int(capacity), x.shape[0])
    y = compute(x, expert, gate, position, experts, capacity=most, **options)
    return y.astype(x.dtype), dropped


def _position(position, expert, gate, num_experts, priority):
    if position is None:
        return positions(expert, num_experts, priority=priority, gate=gate)
    position = _integers("position", position)
    if position.shape != expert.shape:
        raise ValueError(f"position: got shape {position.shape}; allowed: {expert.shape}")
    return position


def _check_capacity(capacity):
    try:
        fits = capacity is None or (
            not isinstance(capacity, bool) and int(capacity) == capacity and capacity >= 1
        )
    except (TypeError, ValueError, OverflowError):  # no number, NaN, infinity, a traced value
        fits = False
    if not fits:
        raise ValueError(f"capacity: got {capacity!r}; allowed: integers >= 1, or None")


def _integers(name, array):
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got dtype {array.dtype}; allowed: integers")
    return array.astype(jnp.int32)


def _check(x, routing, experts):
    """E, after a look at how everything fits together."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got dtype {x.dtype}; allowed: floating-point numbers")
    if hasattr(routing, "expert"):
        expert, gate = jnp.shape(routing.expert), jnp.shape(routing.gate)
        if x.ndim != 2 or expert != gate or expert[:1] != x.shape[:1]:
            raise ValueError(
                f"got x {x.shape}, routing.expert {expert}, routing.gate {gate};"
                " allowed: [T, d], [T, K], [T, K]"
            )
    elif x.ndim != 2 or jnp.shape(routing.probs)[:1] != x.shape[:1]:
        raise ValueError(
            f"got x {x.shape}, routing.probs {jnp.shape(routing.probs)}; allowed: [T, d], [T, E]"
        )
    num_experts, _, _ = check_experts(experts, x.shape[1])
    if jnp.ndim(routing.probs) == 2 and routing.probs.shape[1] != num_experts:
        routed = routing.probs.shape[1]
        raise ValueError(
            f"experts: got {num_experts}; allowed: {routed}, as many as the router has"
        )
    return num_experts


def _dtype(x, experts):
    """What the products are computed in, before they are accumulated in float32."""
    return jnp.result_type(x, *experts.values())
