"""The slow, obvious backend: what every other backend is compared with.

Each group of rows meets every matrix, and what is not its own is masked away: E times the work.

Axis legend: see ``moe_jax.kernels.backend``.
"""

import jax
import jax.numpy as jnp

from moe_jax.kernels.backend import Backend


def _in_group(group_sizes, num_rows):
    """bool[E, N]: whether the row is in the group."""
    end = jnp.cumsum(group_sizes)[:, None]
    row = jnp.arange(num_rows)
    return (row >= end - group_sizes[:, None]) & (row < end)


def matmul(lhs, rhs, group_sizes, *, transposed=False, bias=None, scale=None):
    inside = _in_group(group_sizes, lhs.shape[0])[..., None]
    lhs32 = jnp.where(jnp.any(inside, axis=0), lhs, 0).astype(jnp.float32)
    rhs32 = (jnp.swapaxes(rhs, 1, 2) if transposed else rhs).astype(jnp.float32)
    products = jnp.einsum("na,eab->enb", lhs32, rhs32, precision="highest")
    if bias is not None:
        products += bias[:, None].astype(jnp.float32)
    out = jnp.sum(jnp.where(inside, products, 0), axis=0)
    if scale is not None:
        out = jnp.where(jnp.any(inside, axis=0), out * scale[:, None], 0)
    return out.astype(lhs.dtype)


def hidden(lhs, w_in, w_gate, bias, group_sizes, activation):
    inside = jnp.any(_in_group(group_sizes, lhs.shape[0]), axis=0)[:, None]
    lhs32 = lhs.astype(jnp.float32)
    u = matmul(lhs32, w_in, group_sizes, bias=bias)
    v = None if w_gate is None else matmul(lhs32, w_gate, group_sizes)
    h = activation(u) if v is None else activation(v) * u
    h, u = jnp.where(inside, h, 0).astype(lhs.dtype), u.astype(lhs.dtype)
    return h, u, None if v is None else v.astype(lhs.dtype)


def outer(lhs, rhs, group_sizes, *, scale=None, dtype):
    inside = _in_group(group_sizes, lhs.shape[0])
    there = jnp.any(inside, axis=0)[:, None]
    left = lhs.astype(jnp.float32) if scale is None else lhs * scale[:, None]
    left = jnp.where(there, left, 0).astype(jnp.float32)
    right = jnp.where(there, rhs, 0).astype(jnp.float32)
    inside = inside.astype(jnp.float32)
    return jnp.einsum("en,na,nb->eab", inside, left, right, precision="highest").astype(dtype)


def gather(x, token, *, scale=None):
    rows = x.at[token].get(mode="fill", fill_value=0)
    if scale is None:
        return rows
    return jnp.where(token[:, None] < x.shape[0], rows * scale[:, None], 0).astype(x.dtype)


def combine(rows, row, *, gate=None):
    terms = rows.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)
    if gate is not None:
        terms = jnp.where((row < rows.shape[0])[..., None], terms * gate[..., None], 0)
    return sum(terms[:, j] for j in range(row.shape[1])).astype(rows.dtype)


def gate_gradient(cotangent, rows, row):
    terms = rows.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)
    products = cotangent[:, None].astype(jnp.float32) * terms
    return jnp.where(row < rows.shape[0], jnp.sum(products, axis=-1), 0)


def route(logits, k, valid):
    num_tokens, num_experts = logits.shape
    # A stable sort by falling logit: equal ones stay in the order of their index.
    chosen = jnp.argsort(-logits, axis=1, stable=True)[:, :k]
    used = valid[:, None] & (jnp.take_along_axis(logits, chosen, axis=1) > -jnp.inf)
    expert = jnp.where(used, chosen, num_experts).astype(jnp.int32)
    probs = jax.nn.softmax(logits, axis=1)
    probability = jnp.where(used, jnp.take_along_axis(probs, chosen, axis=1), 0.0)
    flat = expert.ravel()
    same = (flat[None, :] == flat[:, None]) & jnp.tri(flat.size, k=-1, dtype=bool)
    position = jnp.where(flat < num_experts, jnp.sum(same, axis=1), flat.size)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return expert, probability, position.reshape(expert.shape).astype(jnp.int32), counts


BACKEND = Backend("reference", matmul, hidden, outer, gather, combine, gate_gradient, route)
