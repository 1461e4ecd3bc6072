"""Tokens through their experts and back: the dropless layer and its gradients, on any backend.

The gate is folded into the second product, and its gradient is read off the gradient of the hidden
rows: with y = gate * (h w + b), d_gate = h . (dy w^T) + b . dy. So the experts' outputs are not
kept; what is kept are the rows before the activation, as a dense layer keeps them.

Axis legend: T tokens, K slots per token, E experts, N = T*K rows sorted by expert, P of them with
the backend's slack, d model width, f expert width.
"""

import functools

import jax
import jax.numpy as jnp

from moe_jax.kernels.backend import Backend, activate, in_some_group

# A product of one column would do; this is the fewest that every backend takes.
_BIAS_COLUMNS = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dropless_experts(backend: Backend, activation, x, gate, experts, row, assignment, group_sizes):
    """Each token's sum over its slots of gate times its expert's output.

    Args:
      backend: who computes.
      activation: elementwise; it must not close over what is differentiated.
      x: float[T, d].
      gate: f32[T, K].
      experts: weights "w_in" [E, d, f], "w_out" [E, f, d], optional "w_gate", "b_in", "b_out".
      row: i32[T, K], the row of each assignment among those sorted by expert; the largest int32
        for an empty slot.
      assignment: i32[N], the inverse of ``row``; T*K for rows past the last.
      group_sizes: i32[E].

    Returns:
      [T, d] of x's dtype. Reverse-mode differentiable once, in x, gate and experts.
    """
    return _forward(
        backend, activation, x, gate, experts, row, assignment, group_sizes, save=False
    )[0]


def _rows_of(backend, array, assignment, num_slots, num_experts):
    """The tokens' rows of an array [T, d], with the backend's slack: [P, d]."""
    slack = backend.slack_rows(assignment.shape[0], num_experts)
    # Token T is out of range, and reads as zeros.
    token = jnp.pad(assignment // num_slots, (0, slack), constant_values=array.shape[0])
    return backend.gather(array, token)


def _scale(gate, assignment):
    return gate.ravel().at[assignment].get(mode="fill", fill_value=0)


def _forward(backend, activation, x, gate, experts, row, assignment, group_sizes, *, save):
    rows = _rows_of(backend, x, assignment, row.shape[1], group_sizes.shape[0])
    forward = backend.forward or functools.partial(composed_forward, backend)
    scale = _scale(gate, assignment)
    out, saved = forward(rows, scale, experts, group_sizes, activation, save=save)
    return backend.combine(out, row), saved


def _fwd(backend, activation, *arrays):
    y, saved = _forward(backend, activation, *arrays, save=True)
    return y, (*arrays, saved)


def _bwd(backend, activation, residuals, cotangent):
    x, gate, experts, row, assignment, group_sizes, saved = residuals
    num_slots, num_experts = row.shape[1], group_sizes.shape[0]
    rows = _rows_of(backend, x, assignment, num_slots, num_experts)
    d_out = _rows_of(backend, cotangent, assignment, num_slots, num_experts)
    backward = backend.backward or functools.partial(composed_backward, backend)
    scale = _scale(gate, assignment)
    d_rows, d_scale, d_experts = backward(
        rows, scale, experts, group_sizes, activation, saved, d_out
    )
    d_gate = d_scale.at[row].get(mode="fill", fill_value=0).astype(gate.dtype)
    return backend.combine(d_rows, row), d_gate, d_experts, None, None, None


dropless_experts.defvjp(_fwd, _bwd)


def composed_forward(backend, rows, scale, experts, group_sizes, activation, *, save):
    """``backend.Forward`` of two grouped products, with activation and gate in their epilogues.

    The first writes what a backward pass needs whether or not it is to be saved.
    """
    del save
    h, u, v = backend.hidden(
        rows,
        experts["w_in"],
        experts.get("w_gate"),
        experts.get("b_in"),
        group_sizes,
        activation,
    )
    out = backend.matmul(h, experts["w_out"], group_sizes, bias=experts.get("b_out"), scale=scale)
    return out, (u, v)


def composed_backward(backend, rows, scale, experts, group_sizes, activation, saved, cotangent):
    """``backend.Backward`` of grouped products; XLA fuses what is elementwise between them."""
    dtype, wide = rows.dtype, jnp.promote_types(rows.dtype, jnp.float32)

    wide_saved = (None if p is None else p.astype(wide) for p in saved)
    h, pull = jax.vjp(functools.partial(activate, activation), *wide_saved)
    # As the forward pass had it: rounded, and 0 in rows of nobody.
    h = jnp.where(in_some_group(group_sizes, rows.shape[0]), h, 0).astype(dtype)
    dh = backend.matmul(cotangent, experts["w_out"], group_sizes, transposed=True)
    d_scale = jnp.sum(h.astype(wide) * dh.astype(wide), axis=1)
    d_u, d_v = pull(dh.astype(wide) * scale[:, None])
    d_u = d_u.astype(dtype)

    def outer(left, right, name, **keywords):
        return backend.outer(left, right, group_sizes, dtype=experts[name].dtype, **keywords)

    d_experts = {
        "w_in": outer(rows, d_u, "w_in"),
        "w_out": outer(h, cotangent, "w_out", scale=scale),
    }
    d_rows = backend.matmul(d_u, experts["w_in"], group_sizes, transposed=True)
    if d_v is not None:
        d_v = d_v.astype(dtype)
        d_experts["w_gate"] = outer(rows, d_v, "w_gate")
        d_rows += backend.matmul(d_v, experts["w_gate"], group_sizes, transposed=True)
    # The sum over the rows of a group, as a product that keeps to the rows of the group.
    ones = jnp.ones((rows.shape[0], _BIAS_COLUMNS), dtype)
    if "b_in" in experts:
        d_experts["b_in"] = outer(ones, d_u, "b_in")[:, 0]
    if "b_out" in experts:
        d_experts["b_out"] = outer(ones, cotangent, "b_out", scale=scale)[:, 0]
        d_scale += _dot_with_bias(cotangent, experts["b_out"], group_sizes)
    return d_rows, d_scale, d_experts


def _dot_with_bias(rows, bias, group_sizes):
    """f32[N]: each row times the bias of its group."""
    product = jnp.matmul(rows.astype(jnp.float32), bias.T.astype(jnp.float32), precision="highest")
    end = jnp.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0])[:, None]
    member = (row >= end - group_sizes) & (row < end)
    return jnp.sum(jnp.where(member, product, 0), axis=1)
