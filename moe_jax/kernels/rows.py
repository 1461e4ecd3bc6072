"""Moves tokens to expert rows and back, as gathers in both directions.

The plain gradient of a gather is a scatter-add. Here the inverse map is known, so the gradients
are gathers as well: no atomics on an accelerator, and the same sum in the same order every time.

Axis legend: T tokens, K slots per token, d width, R expert rows.
"""

import functools

import jax
import jax.numpy as jnp

from moe_jax.kernels.backend import Backend


def assignment_of_row(row: jax.Array, num_rows: int) -> jax.Array:
    """The inverse of ``row``.

    Args:
      row: i32[T, K], the expert row of each assignment; one of no row is anything >= num_rows.
      num_rows: R.

    Returns:
      i32[R], the index t*K + slot of the assignment in each row; T*K where a row is empty.
    """
    empty = jnp.full(num_rows, row.size, jnp.int32)
    assignments = jnp.arange(row.size, dtype=jnp.int32)
    return empty.at[row.ravel()].set(assignments, mode="drop", unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_rows(backend: Backend, x: jax.Array, row: jax.Array, assignment: jax.Array) -> jax.Array:
    """Copies each token to the rows of its assignments.

    Args:
      backend: who computes.
      x: float[T, d].
      row: i32[T, K], the expert row of each assignment, >= R for none.
      assignment: i32[R], ``assignment_of_row(row, R)``.

    Returns:
      float[R, d]; empty rows are 0. Reverse-mode differentiable in x.
    """
    # An empty row has assignment T*K, hence token T, which is out of range and reads 0.
    return backend.gather(x, assignment // row.shape[1])


def _to_rows_fwd(backend, x, row, assignment):
    return to_rows(backend, x, row, assignment), row


def _to_rows_bwd(backend, row, cotangent):
    return backend.combine(cotangent, row), None, None


to_rows.defvjp(_to_rows_fwd, _to_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def from_rows(
    backend: Backend, rows: jax.Array, gate: jax.Array, row: jax.Array, assignment: jax.Array
) -> jax.Array:
    """Each token's sum of its rows, weighted by their gates, in float32.

    Args:
      backend: who computes.
      rows: float[R, d], the experts' outputs.
      gate: f32[T, K].
      row: i32[T, K], the expert row of each assignment, >= R for none, which adds exactly 0.
      assignment: i32[R], ``assignment_of_row(row, R)``.

    Returns:
      float[T, d] of the rows' dtype. Reverse-mode differentiable in rows and gate.
    """
    return backend.combine(rows, row, gate=gate)


def _from_rows_fwd(backend, rows, gate, row, assignment):
    return from_rows(backend, rows, gate, row, assignment), (rows, gate, row, assignment)


def _from_rows_bwd(backend, residuals, cotangent):
    rows, gate, row, assignment = residuals
    weight = gate.ravel().at[assignment].get(mode="fill", fill_value=0)
    d_rows = backend.gather(cotangent, assignment // row.shape[1], scale=weight)
    return d_rows, backend.gate_gradient(cotangent, rows, row).astype(gate.dtype), None, None


from_rows.defvjp(_from_rows_fwd, _from_rows_bwd)
