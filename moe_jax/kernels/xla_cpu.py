"""Grouped matmuls and whole experts as loops over tiles of rows, in plain XLA: the path for CPUs.

Rows are sorted by group, and the group sizes are known only at run time, while XLA wants static
shapes. So every group is cut into one remainder tile, whose size is the smallest of a ladder of
sizes that holds it, and full tiles of one size, about twice a fair share of the rows: most groups
are one large matmul with little padding. One loop over the groups runs, for each size of the
ladder, a loop of no or one trip, and XLA updates the buffers in place. ``lax.ragged_dot`` costs E
times the useful work on CPU, and a ``lax.switch`` over sizes copies the buffers.

Tiles go from the first row to the last, the remainder of a group before its full tiles. So what a
remainder tile writes past its rows is written over by its successors, without a mask, and the
remainder tile of the gradient of a matrix writes what full tiles add to.

Axis legend: N rows, E groups (experts), d model width, f expert width, a and b the inner and outer
width of a product, P = N + slack_rows(N, E) rows of a buffer.
"""

import jax
import jax.numpy as jnp

from moe_jax.kernels import xla_rows
from moe_jax.kernels.backend import Backend, activate, in_some_group

# Tile sizes in 32nds of a full tile: finest around a fair share, which is 16. More of them pad less
# and compile longer.
_LADDER_32NDS = (4, 8, 12, 14, 15, 16, 17, 18, 20, 24, 32)
# What a matrix product likes the number of its rows to be a multiple of.
_MULTIPLE_ROWS = 8
# Rows of whole pages fall into the same sets of a cache. Before jax 0.12 the product
# left^T right then takes up to 1.8 times as long, unless the left side is transposed beforehand.
_PAGE_BYTES = 4096
_SLOW_ON_PAGES = jax.__version_info__ < (0, 12)


def tile_sizes(num_rows: int, num_groups: int) -> list[int]:
    """The ladder of tile sizes, rising; the last is the full tile, about twice a fair share."""
    unit = 32 * max(num_groups, 1) * _MULTIPLE_ROWS
    sizes = (-(-2 * num_rows * step // unit) * _MULTIPLE_ROWS for step in _LADDER_32NDS)
    return sorted({min(size, num_rows) for size in sizes})


def slack_rows(num_rows: int, num_groups: int) -> int:
    """How far a tile may reach past the last row: the widest gap of the ladder."""
    sizes = tile_sizes(num_rows, num_groups)
    return max(after - before for before, after in zip([0, *sizes], sizes, strict=False))


def matmul(lhs, rhs, group_sizes, *, transposed=False, bias=None, scale=None):
    """See ``backend.Matmul``."""
    num_rows, slack = lhs.shape[0], slack_rows(lhs.shape[0], rhs.shape[0])
    padded = jnp.pad(lhs, ((0, slack), (0, 0)))

    def tile(group, row, size, end, out):
        product = _dot(_rows(padded, row, size), rhs[group], (1, 1 if transposed else 0))
        if bias is not None:
            product += bias[group]
        return _put(out, product, row)

    out = _zeros(lhs, (num_rows + slack, rhs.shape[1 if transposed else 2]))
    out = _for_each_tile(group_sizes, num_rows, tile, tile, out)[:num_rows]
    if scale is not None:
        out = (out * scale[:, None]).astype(out.dtype)
    return jnp.where(in_some_group(group_sizes, num_rows), out, 0)


def hidden(lhs, w_in, w_gate, bias, group_sizes, activation):
    """See ``backend.Hidden``."""
    u = matmul(lhs, w_in, group_sizes, bias=bias)
    v = None if w_gate is None else matmul(lhs, w_gate, group_sizes)
    inside = in_some_group(group_sizes, lhs.shape[0])
    wide = (None if part is None else part.astype(_accumulator(lhs.dtype)) for part in (u, v))
    return jnp.where(inside, activate(activation, *wide), 0).astype(lhs.dtype), u, v


def outer(lhs, rhs, group_sizes, *, scale=None, dtype):
    """See ``backend.Outer``."""
    num_rows, slack = lhs.shape[0], slack_rows(lhs.shape[0], group_sizes.shape[0])
    lhs = lhs if scale is None else (lhs * scale[:, None]).astype(lhs.dtype)
    there = in_some_group(group_sizes, num_rows)
    lhs, rhs = (jnp.pad(jnp.where(there, x, 0), ((0, slack), (0, 0))) for x in (lhs, rhs))

    def tile_with(put_matrix):
        def tile(group, row, size, end, out):
            mine = _inside(row, size, end)
            left, right = (jnp.where(mine, _rows(array, row, size), 0) for array in (lhs, rhs))
            return put_matrix(out, _dot_over_rows(left, right), group)

        return tile

    out = _zeros(lhs, (group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), _accumulator(dtype))
    write, add = tile_with(_put_matrix), tile_with(_add_matrix)
    return _for_each_tile(group_sizes, num_rows, write, add, out).astype(dtype)


def forward(rows, scale, experts, group_sizes, activation, *, save):
    """See ``backend.Forward``."""
    glu = "w_gate" in experts
    num_rows, scale = scale.shape[0], jnp.pad(scale, (0, rows.shape[0] - scale.shape[0]))

    def tile(group, row, size, end, buffers):
        one = {name: weight[group] for name, weight in experts.items()}
        x = _rows(buffers[0], row, size)
        u = _dot(x, one["w_in"], (1, 0)) + one.get("b_in", 0)
        v = _dot(x, one["w_gate"], (1, 0)) if glu else None
        h = activate(activation, u, v).astype(rows.dtype)
        out = _dot(h, one["w_out"], (1, 0)) + one.get("b_out", 0)
        out = (out * _rows(scale, row, size)[:, None]).astype(rows.dtype)
        out = jnp.where(_inside(row, size, end), out, x)
        parts = (out, u, v)
        # As many as there are buffers.
        return tuple(_put(*pair, row) for pair in zip(buffers, parts, strict=False))

    # The results take the place of the rows, which are not needed again: fresh memory is slow.
    wide = _zeros(rows, (rows.shape[0], experts["w_in"].shape[2]))
    buffers = (rows, *([wide] * (1 + glu) if save else []))
    out, *saved = _for_each_tile(group_sizes, num_rows, tile, tile, buffers)
    if not save:
        return out, None
    return out, (saved[0], saved[1] if glu else None)


def backward(rows, scale, experts, group_sizes, activation, saved, cotangent):
    """See ``backend.Backward``."""
    num_rows, scale = scale.shape[0], jnp.pad(scale, (0, rows.shape[0] - scale.shape[0]))

    def tile_with(put_matrix):
        def tile(group, row, size, end, buffers):
            inside = _inside(row, size, end)
            one = {name: weight[group] for name, weight in experts.items()}
            pre = tuple(None if part is None else _rows(part, row, size) for part in saved)
            x, dy = _rows(rows, row, size), _rows(buffers[0], row, size)
            gate = _rows(scale, row, size)[:, None]
            d_row, d_scale, d_one = _tile_gradients(x, gate, one, activation, pre, dy, inside)
            d_row = jnp.where(inside, d_row.astype(rows.dtype), dy)
            d_experts = {n: put_matrix(total, d_one[n], group) for n, total in buffers[2].items()}
            return _put(buffers[0], d_row, row), _put(buffers[1], d_scale, row), d_experts

        return tile

    buffers = (
        cotangent,  # whose place the gradient of the rows takes, as in ``forward``
        jnp.zeros_like(scale),
        {n: _zeros(w, w.shape, _accumulator(w.dtype)) for n, w in experts.items()},
    )
    write, add = tile_with(_put_matrix), tile_with(_add_matrix)
    d_rows, d_scale, d_experts = _for_each_tile(group_sizes, num_rows, write, add, buffers)
    return d_rows, d_scale[:num_rows], {n: d_experts[n].astype(experts[n].dtype) for n in experts}


def _tile_gradients(x, gate, one, activation, pre, dy, inside):
    """Gradients of gate * (h w_out + b_out) for x, gate and the weights ``one`` of the expert.

    Rows that are not inside count in no sum. They are made zeros on both sides of each product,
    since 0 * NaN is NaN, and after the activation, whose derivative at 0 may be infinite.
    """

    def mine(array):
        return jnp.where(inside, array, 0)

    wide = _accumulator(x.dtype)
    h, pull = jax.vjp(
        lambda pre: activate(activation, *pre),
        tuple(None if p is None else p.astype(wide) for p in pre),
    )
    x, dy = mine(x), mine(dy)
    dh = _dot(dy, one["w_out"], (1, 1))
    d_gate = jnp.sum(h * dh, axis=1)
    if "b_out" in one:
        d_gate += _dot(dy, one["b_out"], (1, 0))
    ((du, dv),) = pull(dh * gate)
    du = mine(du).astype(x.dtype)
    dx = _dot(du, one["w_in"], (1, 1))
    hidden = mine(h * gate).astype(x.dtype)
    d_one = {"w_in": _dot_over_rows(x, du), "w_out": _dot_over_rows(hidden, dy)}
    if dv is not None:
        dv = mine(dv).astype(x.dtype)
        dx += _dot(dv, one["w_gate"], (1, 1))
        d_one["w_gate"] = _dot_over_rows(x, dv)
    if "b_in" in one:
        d_one["b_in"] = jnp.sum(du.astype(wide), axis=0)
    if "b_out" in one:
        d_one["b_out"] = jnp.sum(mine(dy * gate), axis=0)
    return dx, d_gate, d_one


def _for_each_tile(group_sizes, num_rows, remainder, full, buffers):
    """Runs a tile function over all tiles, in the order of rows, and threads ``buffers`` through.

    A tile function gets (group, first row, static number of rows, end of the group's rows,
    buffers). Every group begins with a remainder tile, run by ``remainder``, and goes on with full
    tiles, run by ``full``. An empty group has a remainder tile too, none of whose rows are its own.
    """
    if num_rows == 0 or group_sizes.shape[0] == 0:
        return buffers
    sizes = tile_sizes(num_rows, group_sizes.shape[0])
    end = jnp.cumsum(group_sizes)
    num_full = jnp.maximum(group_sizes - 1, 0) // sizes[-1]
    rest = group_sizes - num_full * sizes[-1]
    start = end - group_sizes
    step = jnp.sum(jnp.array(sizes) < rest[:, None], axis=1)

    def group(g, buffers):
        for i, size in enumerate(sizes):
            # The row depends on the loop's index: what does not is moved out of a loop by XLA,
            # and so would be done for every step of the ladder.
            def first(j, buffers, size=size):
                row = start[g] + j
                return remainder(g, row, size, row + rest[g], buffers)

            buffers = jax.lax.fori_loop(0, (step[g] == i).astype(jnp.int32), first, buffers)

        def other(j, buffers):
            row = start[g] + rest[g] + j * sizes[-1]
            return full(g, row, sizes[-1], end[g], buffers)

        return jax.lax.fori_loop(0, num_full[g], other, buffers)

    return jax.lax.fori_loop(0, group_sizes.shape[0], group, buffers)


def _zeros(like, shape, dtype=None):
    """Zeros that in a shard_map vary over the axes of ``like``, as a loop wants of its carry."""
    return jax.lax.full_like(like, 0, dtype, shape)


def _inside(row, size, end):
    return (row + jnp.arange(size) < end)[:, None]


def _rows(array, row, size):
    return jax.lax.dynamic_slice_in_dim(array, row, size, axis=0)


def _put(array, rows, row):
    return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), row, axis=0)


def _put_matrix(array, matrix, group):
    return jax.lax.dynamic_update_index_in_dim(array, matrix.astype(array.dtype), group, axis=0)


def _add_matrix(array, matrix, group):
    return _put_matrix(array, array[group] + matrix, group)


def _accumulator(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _dot(left, right, contracted):
    """Contracts one axis of each, in float32 or better."""
    dtype = _accumulator(jnp.promote_types(left.dtype, right.dtype))
    dimensions = ((contracted[:1], contracted[1:]), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=dtype)


def _dot_over_rows(left, right):
    """left^T right."""
    pages = right.shape[1] * right.dtype.itemsize % _PAGE_BYTES == 0
    if not (pages and _SLOW_ON_PAGES):
        return _dot(left, right, (0, 0))
    # The barrier keeps XLA from taking the transpose back into the product.
    return _dot(jax.lax.optimization_barrier(left.T), right, (1, 0))


BACKEND = Backend(
    "xla_cpu",
    matmul,
    hidden,
    outer,
    xla_rows.gather,
    xla_rows.combine,
    xla_rows.gate_gradient,
    xla_rows.route,
    forward,
    backward,
    slack_rows,
)
