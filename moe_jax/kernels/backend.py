"""What a backend provides: the forward pieces of a mixture-of-experts layer, without gradients.

Gradients are defined once, over these pieces, in ``grouped``, ``rows``, ``experts`` and ``router``
beside this module: the backward pass of each piece is made of other pieces.

Axis legend: T tokens, K slots per token, E experts, k choices, N rows sorted by expert, P of them
with slack, a and b the inner and outer width of a product, d model width, f expert width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Matmul(Protocol):
    """Each row times the matrix of its group."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        transposed: bool = False,
        bias: jax.Array | None = None,
        scale: jax.Array | None = None,
    ) -> jax.Array:
        """(lhs[n] @ rhs[g] + bias[g]) * scale[n], accumulated in float32 for 16-bit inputs.

        Args:
          lhs: float[N, a], rows sorted by group; those past the sum of the sizes may hold anything.
          rhs: float[E, a, b]; with ``transposed`` float[E, b, a], of which the last axis is summed.
          group_sizes: i32[E], sum <= N.
          bias: float[E, b] or None.
          scale: f32[N] or None.

        Returns:
          [N, b] of lhs's dtype; rows past the sum of the sizes are 0.
        """


class Hidden(Protocol):
    """The first half of the experts: matmul, bias and activation in one pass."""

    def __call__(
        self,
        lhs: jax.Array,
        w_in: jax.Array,
        w_gate: jax.Array | None,
        bias: jax.Array | None,
        group_sizes: jax.Array,
        activation: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """activation(u), or with w_gate activation(v) * u; u = lhs w_in + bias, v = lhs w_gate.

        Args:
          lhs: float[N, d], rows sorted by group; those past the sum of the sizes may hold anything.
          w_in, w_gate: float[E, d, f]; w_gate may be None.
          bias: float[E, f] or None.
          group_sizes: i32[E], sum <= N.
          activation: elementwise, applied in float32.

        Returns:
          hidden, u and v (None without w_gate), [N, f] each of lhs's dtype; 0 past the sum.
        """


class Outer(Protocol):
    """The gradient of a grouped matmul for its matrices."""

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        scale: jax.Array | None = None,
        dtype: DTypeLike,
    ) -> jax.Array:
        """Sum over the rows n of each group of scale[n] * lhs[n] x rhs[n], accumulated in float32.

        Args:
          lhs: float[N, a].  rhs: float[N, b].  Both may hold anything past the sum of the sizes.
          group_sizes: i32[E], sum <= N.  scale: f32[N] or None.  dtype: of the result.

        Returns:
          [E, a, b]; exactly 0 for an empty group.
        """


class Gather(Protocol):
    """Tokens to rows."""

    def __call__(
        self, x: jax.Array, token: jax.Array, *, scale: jax.Array | None = None
    ) -> jax.Array:
        """x[token[n]] * scale[n], 0 where token[n] is T or more.

        Args:
          x: float[T, d].  token: i32[N], >= 0.  scale: f32[N] or None.

        Returns:
          [N, d] of x's dtype.
        """


class Combine(Protocol):
    """Rows to tokens."""

    def __call__(
        self, rows: jax.Array, row: jax.Array, *, gate: jax.Array | None = None
    ) -> jax.Array:
        """Sum over j of gate[t, j] * rows[row[t, j]], in float32 and in the order of j.

        Args:
          rows: float[N, d].
          row: i32[T, K]; a slot with row >= N adds exactly 0, whatever its gate.
          gate: f32[T, K]; None means 1.

        Returns:
          [T, d] of the rows' dtype.
        """


class GateGradient(Protocol):
    """The gradient of ``Combine`` for its gates."""

    def __call__(self, cotangent: jax.Array, rows: jax.Array, row: jax.Array) -> jax.Array:
        """f32[T, K]: cotangent[t] . rows[row[t, j]] in float32, 0 for a slot with row >= N.

        Args:
          cotangent: float[T, d].  rows: float[N, d].  row: i32[T, K].
        """


class Route(Protocol):
    """Softmax, top-k, position in expert and counts, in one pass over the logits."""

    def __call__(
        self, logits: jax.Array, k: int, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Routes every valid token to the experts of its k largest logits.

        Args:
          logits: f32[T, E].  k: 1 <= k <= E.  valid: bool[T].

        Returns:
          expert i32[T, k]: by falling logit, equal ones by lowest index; E for an invalid token or
            a logit of -inf.
          probability f32[T, k]: softmax over all E logits, of the expert; 0 in empty slots.
          position i32[T, k]: how many earlier assignments (token by token, a token's choices in
            order) name the same expert; T*k in empty slots.
          counts i32[E]: assignments per expert.
        """


Experts = dict[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]
PreActivations = tuple[jax.Array, jax.Array | None]


def activate(activation: Activation, u: jax.Array, v: jax.Array | None) -> jax.Array:
    """The hidden rows of the pre-activations u and v, as ``Hidden`` says; v is None without GLU."""
    return activation(u) if v is None else activation(v) * u


def in_some_group(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """bool[N, 1]: whether the row is one before the sum of the sizes."""
    return (jnp.arange(num_rows) < jnp.sum(group_sizes))[:, None]


# What the fused routers for accelerators hold in registers or in one tile.
MOST_EXPERTS, MOST_CHOICES = 256, 8


def check_route(num_tokens: int, num_experts: int, k: int) -> None:
    """Refuses what a kernel for ``Route`` does not hold.

    Raises:
      ValueError: names the size, its value and what is allowed.
    """
    most = min(num_experts, MOST_CHOICES)
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts: got {num_experts}; allowed: 1 to {MOST_EXPERTS}")
    if not 1 <= k <= most:
        raise ValueError(f"k: got {k}; allowed: 1 to {most}")
    check_index(num_tokens * k, "assignments T*k")


def check_index(count: int, what: str) -> None:
    """Refuses more of something than an int32 can number.

    Raises:
      ValueError: count >= 2**31.
    """
    if count >= 2**31:
        raise ValueError(f"{what}: got {count}; allowed: less than 2**31 = {2**31}")


class Forward(Protocol):
    """The whole experts on rows."""

    def __call__(
        self,
        rows: jax.Array,
        scale: jax.Array,
        experts: Experts,
        group_sizes: jax.Array,
        activation: Activation,
        *,
        save: bool,
    ) -> tuple[jax.Array, PreActivations | None]:
        """scale[n] * (h[n] w_out + b_out), where h is what ``Hidden`` says.

        Args:
          rows: float[P, d], sorted by group, P = N + ``slack_rows``; 0 past the sum of the sizes.
          scale: f32[N].
          experts: weights "w_in", "w_out", optional "w_gate", "b_in", "b_out".
          group_sizes: i32[E].  activation: elementwise.
          save: whether a backward pass follows.

        Returns:
          [P, d] of the rows' dtype, and u and v of ``Hidden`` for the backward pass, which may be
          left out if nothing is to be saved; any of them may hold anything past the sum.
        """


class Backward(Protocol):
    """The gradients of ``Forward``."""

    def __call__(
        self,
        rows: jax.Array,
        scale: jax.Array,
        experts: Experts,
        group_sizes: jax.Array,
        activation: Activation,
        saved: PreActivations,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Experts]:
        """Takes the arguments of ``Forward``, what it saved, and the cotangent of its rows.

        Args:
          cotangent: float[P, d], 0 past the sum of the sizes.

        Returns:
          Gradients of rows [P, d], scale f32[N] (both may hold anything past the sum) and experts.
        """


class Backend(NamedTuple):
    """One way to compute everything.

    Attributes:
      name: as ``explain`` and the ``backend`` arguments call it.
      matmul, hidden, outer, gather, combine, gate_gradient, route: the pieces.
      forward, backward: the experts as a whole; None means that they are put together from matmul,
        hidden and outer.
      slack_rows: (N, E) -> rows that ``forward`` and ``backward`` need after the last row.
      typed: whether it computes where ``jax.shard_map`` checks over which axes of the mesh a value
        varies; if not, it needs check_vma=False there.
    """

    name: str
    matmul: Matmul
    hidden: Hidden
    outer: Outer
    gather: Gather
    combine: Combine
    gate_gradient: GateGradient
    route: Route
    forward: Forward | None = None
    backward: Backward | None = None
    slack_rows: Callable[[int, int], int] = lambda num_rows, num_groups: 0
    typed: bool = True


def of_kernels(name: str, grouped, rows, router, interpret) -> Backend:
    """The backend of three modules of kernels, each of which can be interpreted.

    Args:
      name: of the backend.
      grouped, rows, router: modules with matmul, hidden, outer; gather, combine, gate_gradient;
        and route.
      interpret: False, or how the kernels are to be interpreted.
    """
    pieces = (
        grouped.matmul,
        grouped.hidden,
        grouped.outer,
        rows.gather,
        rows.combine,
        rows.gate_gradient,
        router.route,
    )
    return Backend(name, *(functools.partial(piece, interpret=interpret) for piece in pieces))
