"""Grouped matmul as a loop of plain matmuls in XLA: the path for CPUs.

Rows are sorted by group, and the group sizes are known only at run time, while XLA wants static
shapes. So every group is cut into full tiles and one remainder tile, whose size is the smallest of
a ladder of sizes that holds the rest. A tile is about twice a fair share of the rows: most groups
are one matmul with little padding. For each size there is one loop over the tiles of that size,
whose number is known at run time, and XLA updates the output in place. ``lax.ragged_dot`` costs E
times the useful work on CPU, and a ``lax.switch`` over sizes copies the buffers.

Axis legend: N rows, E groups (experts), d and f the inner and outer width of the product.
"""

import jax
import jax.numpy as jnp

# Tile sizes in eighths of a full tile: finest just around a fair share, which is 4. More of them
# pad less and compile longer.
_LADDER_EIGHTHS = (1, 2, 3, 4, 5, 8)
_SMALLEST_TILE_ROWS = 32


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows of lhs by its own matrix.

    Reverse-mode differentiable once, in lhs and rhs. bfloat16 inputs are accumulated in float32.

    Args:
      lhs: float[N, d], rows sorted by group; row 0 is the first row of group 0.
      rhs: float[E, d, f].
      group_sizes: i32[E], rows of each group; sum <= N.

    Returns:
      float[N, f] of lhs's dtype; rows past the sum of the sizes are 0 and get no gradient.

    Raises:
      ValueError: shapes that do not fit.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"got lhs {lhs.shape}, rhs {rhs.shape}; allowed: [N, d] and [E, d, f]")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"group_sizes: got shape {group_sizes.shape}; allowed: {rhs.shape[:1]}")
    return _grouped_matmul(lhs, rhs, group_sizes)


@jax.custom_vjp
def _grouped_matmul(lhs, rhs, group_sizes):
    return _multiply(lhs, rhs, group_sizes, contracted=1)


def _multiply(lhs, rhs, group_sizes, *, contracted):
    """Rows of lhs times the matrix of their group, or its transpose if axis 2 is contracted."""

    def multiply(group, rows, inside, out):
        # contracted is an axis of rhs [E, d, f]; a copy of all matrices transposed would cost E.
        product = _dot(_rows(lhs, rows), rhs[group], ((1,), (contracted - 1,)), lhs.dtype)
        product = jnp.where(inside[:, None], product, _rows(out, rows))
        return jax.lax.dynamic_update_slice_in_dim(out, product, rows[0], axis=0)

    out = jnp.zeros((lhs.shape[0], rhs.shape[3 - contracted]), lhs.dtype)
    return _for_each_tile(group_sizes, lhs.shape[0], multiply, multiply, out)


def _grouped_outer(lhs, rhs, group_sizes, dtype):
    """Sum over each group's rows of lhs[row] x rhs[row]: [E, d, f] from [N, d] and [N, f]."""
    accumulator = jnp.promote_types(dtype, jnp.float32)

    def outer(rows, inside):
        left = jnp.where(inside[:, None], _rows(lhs, rows), 0)
        right = jnp.where(inside[:, None], _rows(rhs, rows), 0)
        return _dot(left, right, ((0,), (0,)), accumulator)[None]

    def write(group, rows, inside, out):
        return jax.lax.dynamic_update_slice_in_dim(out, outer(rows, inside), group, axis=0)

    def add(group, rows, inside, out):
        total = jax.lax.dynamic_slice_in_dim(out, group, 1) + outer(rows, inside)
        return jax.lax.dynamic_update_slice_in_dim(out, total, group, axis=0)

    out = jnp.zeros((group_sizes.shape[0], lhs.shape[1], rhs.shape[1]), accumulator)
    return _for_each_tile(group_sizes, lhs.shape[0], write, add, out).astype(dtype)


def _for_each_tile(group_sizes, num_rows, remainder, full, out):
    """Runs a tile function over all tiles and threads ``out`` through.

    A tile function gets (group, (first row, static number of rows), inside bool[rows], out); rows
    not inside belong to other groups. All remainder tiles, run by ``remainder``, come before all
    full tiles, run by ``full``, so that the first may write where the others add.
    """
    num_groups = group_sizes.shape[0]
    if num_rows == 0 or num_groups == 0:
        return out
    sizes = tile_sizes(num_rows, num_groups)
    end = jnp.cumsum(group_sizes)
    num_full, rest = jnp.divmod(group_sizes, sizes[-1])

    def loop(function, tile, groups, first, begin, stop, out):
        # The last tiles would stick out of the array: shift them back and mask.
        row = jnp.minimum(first, num_rows - tile)
        past = end[groups]

        def body(i, out):
            index = row[i] + jnp.arange(tile)
            inside = (index >= first[i]) & (index < past[i])
            return function(groups[i], (row[i], tile), inside, out)

        return jax.lax.fori_loop(begin, stop, body, out)

    # The groups in order of the ladder step of their rest: each step is one run of this list.
    step = _count_below(jnp.array(sizes), rest)
    step = jnp.where(rest > 0, step, len(sizes))
    by_step = jnp.argsort(step)
    first_of_step = _count_below(step, jnp.arange(len(sizes) + 1))
    first = (end - rest)[by_step]
    for i, tile in enumerate(sizes):
        begin, stop = first_of_step[i], first_of_step[i + 1]
        out = loop(remainder, tile, by_step, first, begin, stop, out)

    # Full tile number i belongs to the first group by which more than i tiles are counted.
    tiles_so_far = jnp.cumsum(num_full)
    number = jnp.arange(num_rows // sizes[-1])
    groups = jnp.minimum(_count_below(tiles_so_far, number + 1), num_groups - 1)
    number_in_group = number - (tiles_so_far - num_full)[groups]
    first = (end - group_sizes)[groups] + number_in_group * sizes[-1]
    return loop(full, sizes[-1], groups, first, 0, tiles_so_far[-1], out)


def _count_below(values, limits):
    """For each limit, how many of ``values`` are smaller."""
    return jnp.sum(values[None, :] < limits[:, None], axis=1)


def tile_sizes(num_rows: int, num_groups: int) -> list[int]:
    """The ladder of tile sizes, rising; the last is the full tile, about twice a fair share."""
    eighth = -(-2 * num_rows // (8 * num_groups))
    eighth = -(-eighth // _SMALLEST_TILE_ROWS) * _SMALLEST_TILE_ROWS
    return sorted({min(eighth * step, num_rows) for step in _LADDER_EIGHTHS})


def _rows(array, rows):
    return jax.lax.dynamic_slice_in_dim(array, rows[0], rows[1], axis=0)


def _dot(left, right, contracting, dtype):
    accumulator = jnp.promote_types(left.dtype, jnp.float32)
    dimensions = (contracting, ((), ()))
    product = jax.lax.dot_general(left, right, dimensions, preferred_element_type=accumulator)
    return product.astype(dtype)


def _grouped_matmul_fwd(lhs, rhs, group_sizes):
    return _grouped_matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _grouped_matmul_bwd(residuals, cotangent):
    lhs, rhs, group_sizes = residuals
    d_lhs = _multiply(cotangent, rhs, group_sizes, contracted=2)
    d_rhs = _grouped_outer(lhs, cotangent, group_sizes, rhs.dtype)
    return d_lhs.astype(lhs.dtype), d_rhs, None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)
