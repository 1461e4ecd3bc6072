"""Grouped matrix products on TPU, in Pallas.

Rows are sorted by group, and the group sizes are known only at run time, while the grid of a kernel
is static. The rows are cut into tiles at fixed places. A visit is a tile together with a group that
has rows in it; of the visits in order of the rows there are at most tiles + groups - 1, and the
grid has that many steps. Which tile and group a step works on is computed before in jnp and
prefetched as scalars; steps that are left over have no rows and load nothing new.

A tile that lies in one group is one product. One that holds the border of groups is visited by each
of them, and a visit multiplies only those strips of the tile that hold its rows. So the rows
multiplied are at most N + (E - 1) strips, and masks keep the rows of other groups apart. Masks
select, since what lies past the sum of the sizes, and past the ends of the arrays, may be NaN.

Axis legend: N rows, E groups (experts), a and b the inner and outer width of a product, d model
width, f expert width; V visits.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from moe_jax.kernels.manual import result_type

# Large tiles hide the loading of the next matrix, and matter most where it is loaded in parts.
_TILE_ROWS = (512, 1024, 2048)
# As many rows as a matrix unit needs to be busy while the next weights are loaded into it.
_STRIP_ROWS = 128
_LANES = 128
# Of a sum over blocks: an inner width that keeps adding up cheap beside multiplying.
_SMALLEST_PART = 512
# Of the 64 MiB of the smallest core: for the blocks and sums of a kernel, and with what the
# compiler adds.
_VMEM_BLOCKS = 36 * 2**20
_VMEM_LIMIT = 56 * 2**20


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """(lhs[n] @ rhs[g] + bias[g]) * scale[n]; see ``moe_jax.kernels.backend.Matmul``.

    Args:
      lhs: float[N, a], rows sorted by group; those past the sum of the sizes may hold anything.
      rhs: float[E, a, b]; with ``transposed`` float[E, b, a], of which the last axis is summed.
      group_sizes: i32[E], sum <= N.
      bias: float[E, b] or None.  scale: f32[N] or None.
      interpret: see ``pl.pallas_call``.

    Returns:
      [N, b] of lhs's dtype; rows past the sum of the sizes are 0.

    Raises:
      ValueError: shapes that do not fit.
    """

    def epilogue(products, bias, scale):
        (out,) = products
        out = out if bias is None else out + bias
        return [out if scale is None else out * scale]

    (out,) = _rows_times_matrices(
        lhs,
        [rhs],
        bias,
        scale,
        group_sizes,
        epilogue,
        1,
        transposed=transposed,
        interpret=interpret,
    )
    return out


def hidden(
    lhs: jax.Array,
    w_in: jax.Array,
    w_gate: jax.Array | None,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """activation(u), or with w_gate activation(v) * u; see ``moe_jax.kernels.backend.Hidden``.

    Args:
      lhs: float[N, d], rows sorted by group; those past the sum of the sizes may hold anything.
      w_in, w_gate: float[E, d, f]; w_gate may be None.
      bias: float[E, f] or None.
      group_sizes: i32[E], sum <= N.
      activation: elementwise, of functions that Mosaic can lower.
      interpret: see ``pl.pallas_call``.

    Returns:
      hidden, u and v (None without w_gate), [N, f] each of lhs's dtype; 0 past the sum.

    Raises:
      ValueError: shapes that do not fit.
    """

    def epilogue(products, bias, scale):
        del scale
        u = products[0] if bias is None else products[0] + bias
        if w_gate is None:
            return [activation(u), u]
        v = products[1]
        return [activation(v) * u, u, v]

    matrices = [w_in] if w_gate is None else [w_in, w_gate]
    num_outs = 1 + len(matrices)
    outs = _rows_times_matrices(
        lhs, matrices, bias, None, group_sizes, epilogue, num_outs, interpret=interpret
    )
    return (*outs, None) if w_gate is None else tuple(outs)


def outer(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    dtype: DTypeLike,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Sum over the rows of each group of scale * lhs x rhs; see ``moe_jax.kernels.backend.Outer``.

    Args:
      lhs: float[N, a].  rhs: float[N, b].  Both may hold anything past the sum of the sizes.
      group_sizes: i32[E], sum <= N.  scale: f32[N] or None.  dtype: of the result.
      interpret: see ``pl.pallas_call``.

    Returns:
      [E, a, b]; exactly 0 for an empty group.

    Raises:
      ValueError: shapes that do not fit.
    """
    _check_outer(lhs, rhs, group_sizes, scale)
    (num_rows, a), b, num_groups = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    out = result_type((num_groups, a, b), dtype, lhs, rhs, group_sizes)
    if 0 in (num_rows, *out.shape):
        return jnp.zeros(out.shape, out.dtype)
    strip, tile, a_tile, b_tile = _outer_tiles(lhs, rhs, num_groups, out.dtype)
    num_tiles = pl.cdiv(num_rows, tile)
    return pl.pallas_call(
        functools.partial(_outer_kernel, strip=strip),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(a, a_tile), pl.cdiv(b, b_tile), num_tiles + num_groups - 1),
            in_specs=[
                pl.BlockSpec((tile, a_tile), lambda i, j, v, s: (s.loaded[v], i)),
                pl.BlockSpec((tile, b_tile), lambda i, j, v, s: (s.loaded[v], j)),
                None
                if scale is None
                else pl.BlockSpec(
                    (tile // strip, 1, strip), lambda i, j, v, s: (s.loaded[v], 0, 0)
                ),
            ],
            out_specs=pl.BlockSpec((None, a_tile, b_tile), lambda i, j, v, s: (s.group[v], i, j)),
            scratch_shapes=[pltpu.VMEM((a_tile, b_tile), jnp.float32)],
        ),
        compiler_params=_compiler_params("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(2 * num_rows * a * b, [lhs, rhs, out]),
        interpret=interpret,
    )(
        _visits(group_sizes, num_tiles, tile, every_group=True),
        lhs,
        rhs,
        _strips(scale, num_tiles * tile, strip),
    )


def _rows_times_matrices(
    lhs, matrices, bias, scale, group_sizes, epilogue, num_outs, *, transposed=False, interpret
):
    """List of num_outs [N, b]: epilogue of the products with each matrix, bias and scale.

    The epilogue gets the products of some rows, f32[n, b] each, their bias [1, b] and their scale
    [n, 1], or None, and returns a list of [n, b].
    """
    _check(lhs, matrices, bias, scale, group_sizes, transposed)
    num_groups, num_rows, a = matrices[0].shape[0], *lhs.shape
    b = matrices[0].shape[1 if transposed else 2]
    out = result_type((num_rows, b), lhs.dtype, lhs, matrices, group_sizes)
    if 0 in (num_groups, num_rows, a, b):
        return [jnp.zeros(out.shape, out.dtype)] * num_outs
    strip, tile, a_tile, b_tile = _matmul_tiles(lhs, matrices, b, num_outs)
    num_tiles, a_tiles = pl.cdiv(num_rows, tile), pl.cdiv(a, a_tile)

    def part(v, k, visits):
        # A visit without rows stays at the part that is there already.
        return jnp.where(visits.begin[v] < visits.end[v], k, a_tiles - 1)

    if transposed:
        matrix_spec = pl.BlockSpec(
            (None, b_tile, a_tile), lambda j, v, k, s: (s.group[v], j, part(v, k, s))
        )
    else:
        matrix_spec = pl.BlockSpec(
            (None, a_tile, b_tile), lambda j, v, k, s: (s.group[v], part(v, k, s), j)
        )
    bias_spec = pl.BlockSpec((None, 1, b_tile), lambda j, v, k, s: (s.group[v], 0, j))
    scale_spec = pl.BlockSpec((tile // strip, 1, strip), lambda j, v, k, s: (s.loaded[v], 0, 0))
    out_spec = pl.BlockSpec((tile, b_tile), lambda j, v, k, s: (s.tile[v], j))
    return pl.pallas_call(
        functools.partial(
            _rows_kernel, inner=a, transposed=transposed, strip=strip, epilogue=epilogue
        ),
        out_shape=[out] * num_outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(b, b_tile), num_tiles + num_groups - 1, a_tiles),
            in_specs=[
                pl.BlockSpec((tile, a_tile), lambda j, v, k, s: (s.loaded[v], part(v, k, s))),
                [matrix_spec] * len(matrices),
                None if bias is None else bias_spec,
                None if scale is None else scale_spec,
            ],
            out_specs=[out_spec] * num_outs,
            scratch_shapes=[[pltpu.VMEM((tile, b_tile), jnp.float32)] * len(matrices)],
        ),
        compiler_params=_compiler_params("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(
            2 * num_rows * a * b * len(matrices), [lhs, *matrices, *[out] * num_outs]
        ),
        interpret=interpret,
    )(
        _visits(group_sizes, num_tiles, tile, every_group=False),
        lhs,
        matrices,
        None if bias is None else bias[:, None],
        _strips(scale, num_tiles * tile, strip),
    )


def _rows_kernel(
    visits, lhs, matrices, bias, scale, *outs_and_sums, inner, transposed, strip, epilogue
):
    *outs, sums = outs_and_sums
    v, k = pl.program_id(1), pl.program_id(2)
    (tile, a_tile), contracted = lhs.shape, 1 if transposed else 0
    begin, end = visits.begin[v], visits.end[v]

    def below_end(block, axis):
        if inner % a_tile == 0:
            return block
        index = jax.lax.broadcasted_iota(jnp.int32, block.shape, axis)
        return jnp.where(index < inner - k * a_tile, block, 0)

    def multiply(first, rows, partly):
        # Rows of others do no harm here: each row of a product depends on its own row alone.
        del partly
        rows = pl.ds(first, rows)
        left = below_end(lhs[rows], 1)
        for matrix, total in zip(matrices, sums, strict=True):
            product = _dot(left, below_end(matrix[...], contracted), (1, contracted))
            if inner > a_tile:
                product = jnp.where(k == 0, product, product + total[rows])
            total[rows] = product

    _for_strips(begin, end, tile, strip, multiply)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        is_new = (v == 0) | (visits.tile[v] != visits.tile[jnp.maximum(v - 1, 0)])

        @pl.when(is_new & (end - begin < tile))
        def _():
            for out in outs:
                out[...] = jnp.zeros_like(out)

        def finish(i, _):
            first = pl.multiple_of(i * strip, strip)
            rows = pl.ds(first, strip)
            results = epilogue(
                [total[rows] for total in sums],
                None if bias is None else bias[...].astype(jnp.float32),
                None if scale is None else _column(scale[i]),
            )
            inside = _inside(begin - first, end - first, strip)
            for out, result in zip(outs, results, strict=True):
                result = jnp.where(inside, result, out[rows].astype(jnp.float32))
                out[rows] = result.astype(out.dtype)

        jax.lax.fori_loop(begin // strip, pl.cdiv(end, strip), finish, None)


def _outer_kernel(visits, lhs, rhs, scale, out, total, *, strip):
    v, num_visits = pl.program_id(2), pl.num_programs(2)
    begin, end, group = visits.begin[v], visits.end[v], visits.group[v]

    @pl.when((v == 0) | (group != visits.group[jnp.maximum(v - 1, 0)]))
    def _():
        total[...] = jnp.zeros_like(total)

    def add(first, rows, partly):
        left, right = lhs[pl.ds(first, rows)], rhs[pl.ds(first, rows)]
        if scale is not None:
            columns = [_column(scale[first // strip + i]) for i in range(rows // strip)]
            left = (left * jnp.concatenate(columns)).astype(left.dtype)
        if partly:
            inside = _inside(begin - first, end - first, rows)
            left, right = jnp.where(inside, left, 0), jnp.where(inside, right, 0)
        total[...] += _dot(left, right, (0, 0))

    _for_strips(begin, end, lhs.shape[0], strip, add)

    @pl.when((v == num_visits - 1) | (group != visits.group[jnp.minimum(v + 1, num_visits - 1)]))
    def _():
        out[...] = total[...].astype(out.dtype)


def _for_strips(begin, end, tile, strip, body):
    """Calls body(first row, number of rows, partly) for a whole tile, or strips of one.

    partly: whether there may be rows that are not from begin to end.
    """

    @pl.when(end - begin == tile)
    def _():
        body(0, tile, False)

    @pl.when((begin < end) & (end - begin < tile))
    def _():
        def one(i, _):
            body(pl.multiple_of(i * strip, strip), strip, True)

        jax.lax.fori_loop(begin // strip, pl.cdiv(end, strip), one, None)


def _dot(left, right, contracted):
    """Product of blocks, summed over an axis of each, in float32."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _inside(begin, end, rows):
    """bool[rows, 1]: whether the row is one from begin to end."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= begin) & (row < end)


def _column(row):
    """[1, n] to [n, 1]."""
    shape = (row.shape[1], row.shape[1])
    diagonal = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )
    return jnp.sum(jnp.where(diagonal, row, 0), axis=1, keepdims=True)


def _strips(scale, num_rows, strip):
    """f32[N] to f32[strips, 1, strip], which needs no padding to lanes as [N, 1] does."""
    if scale is None:
        return None
    padded = jnp.pad(scale.astype(jnp.float32), (0, num_rows - scale.size))
    return padded.reshape(-1, 1, strip)


class _Visits(NamedTuple):
    """What each step of the grid works on.

    Attributes:
      group: i32[V].  Its matrices are loaded, or its sum is stored.
      loaded: i32[V], the tile of rows that is read.
      tile: i32[V], the tile of rows that is written.
      begin, end: i32[V], the rows of the group within the tile; both 0 if there are none.
    """

    group: jax.Array
    loaded: jax.Array
    tile: jax.Array
    begin: jax.Array
    end: jax.Array


def _visits(group_sizes, num_tiles, tile, *, every_group):
    """The visits in order of the rows, num_tiles + E - 1 of them, repeating the last.

    Each tile with rows is visited by each of its groups. With every_group also groups without rows
    have a visit, else also tiles without rows have.
    """
    num_groups = group_sizes.shape[0]
    end = jnp.cumsum(group_sizes.astype(jnp.int32))
    start = end - group_sizes
    first = start // tile
    count = jnp.where(group_sizes > 0, (end - 1) // tile - first + 1, int(every_group))
    num_loads = jnp.sum(count)
    if not every_group:
        # The tiles past the last row belong to one more group, which has no rows.
        filled = -(-end[-1] // tile)
        first, count = jnp.append(first, filled), jnp.append(count, num_tiles - filled)
        start, end = jnp.append(start, 0), jnp.append(end, 0)
    past = jnp.cumsum(count)
    step = jnp.arange(num_tiles + num_groups - 1)
    visit = jnp.minimum(step, past[-1] - 1)
    group = jnp.searchsorted(past, visit, side="right", method="compare_all")
    of_tile = jnp.minimum(first[group] + visit - (past - count)[group], num_tiles - 1)
    begin = jnp.clip(start[group] - of_tile * tile, 0, tile)
    end = jnp.clip(end[group] - of_tile * tile, 0, tile)
    has_rows = (begin < end) & (step < past[-1])
    begin, end = jnp.where(has_rows, begin, 0), jnp.where(has_rows, end, 0)
    # A tile without rows loads nothing: it repeats the last visit with rows.
    source = jnp.minimum(visit, jnp.maximum(num_loads - 1, 0))
    group = jnp.minimum(group[source], num_groups - 1)
    visits = _Visits(group, of_tile[source], of_tile, begin, end)
    return jax.tree.map(lambda x: x.astype(jnp.int32), visits)


def _matmul_tiles(lhs, matrices, b, num_outs):
    """Rows of a strip and of a tile, and the inner and outer width of a block of a matrix.

    Of those that fit, the one that moves the fewest bytes, and of equal ones the smallest tile. A
    matrix in one part stays while its group is visited, and one in several is loaded in each visit.
    """
    (num_rows, a), num_groups, num_matrices = lhs.shape, matrices[0].shape[0], len(matrices)
    strip, tiles = _row_tiles(num_rows, num_groups)

    def fits(tile, a_tile, b_tile):
        blocks = _block_bytes(tile, a_tile, lhs.dtype)
        blocks += _block_bytes(a_tile, b_tile, matrices[0].dtype) * num_matrices
        blocks += _block_bytes(tile, b_tile, lhs.dtype) * num_outs
        # A sum for each matrix, and a product to add to it.
        sums = _block_bytes(tile, b_tile, jnp.float32) * (num_matrices + 1)
        return 2 * blocks + sums <= _VMEM_BLOCKS

    def cost(tile, a_tile, b_tile):
        a_tiles, b_tiles = pl.cdiv(a, a_tile), pl.cdiv(b, b_tile)
        visits = pl.cdiv(num_rows, tile) + num_groups - 1
        loads = visits if a_tiles > 1 else min(num_groups, num_rows)
        matrix = a_tiles * a_tile * b_tiles * b_tile * matrices[0].dtype.itemsize
        moved = loads * matrix * num_matrices + b_tiles * num_rows * a * lhs.dtype.itemsize
        return moved, tile, a_tiles * b_tiles

    inner_widths = [width for width in _widths(a) if width >= min(a, _SMALLEST_PART)]
    # Two cores share the outer width where a chip has two.
    outer_widths = [width for width in _widths(b) if width < b or b < 4 * _LANES]
    candidates = itertools.product(tiles, inner_widths, outer_widths)
    return strip, *min((c for c in candidates if fits(*c)), key=lambda c: cost(*c))


def _outer_tiles(lhs, rhs, num_groups, dtype):
    """Rows of a strip and of a tile, and the widths of a block of the result; as _matmul_tiles."""
    (num_rows, a), b = lhs.shape, rhs.shape[1]
    strip, (tile, *_) = _row_tiles(num_rows, num_groups)

    def fits(a_tile, b_tile):
        blocks = _block_bytes(tile, a_tile, lhs.dtype) + _block_bytes(tile, b_tile, rhs.dtype)
        blocks += _block_bytes(a_tile, b_tile, dtype)
        return 2 * (blocks + _block_bytes(a_tile, b_tile, jnp.float32)) <= _VMEM_BLOCKS

    def cost(a_tile, b_tile):
        a_tiles, b_tiles = pl.cdiv(a, a_tile), pl.cdiv(b, b_tile)
        return b_tiles * a * lhs.dtype.itemsize + a_tiles * b * rhs.dtype.itemsize

    candidates = itertools.product(_widths(a), _widths(b))
    return strip, tile, *min((c for c in candidates if fits(*c)), key=lambda c: cost(*c))


def _row_tiles(num_rows, num_groups):
    """Rows of a strip, at most a fair share, and the possible rows of a tile, rising."""
    strip = min(_STRIP_ROWS, _round_up(pl.cdiv(num_rows, num_groups), 16))
    tiles = {min(_round_up(num_rows, strip), rows // strip * strip) for rows in _TILE_ROWS}
    return strip, sorted(tiles)


def _widths(size):
    """The widths of blocks that cut ``size`` into equal parts: all of it, or multiples of 128."""
    parts = range(1, pl.cdiv(size, _LANES) + 1)
    return sorted({min(size, _round_up(pl.cdiv(size, n), _LANES)) for n in parts}, reverse=True)


def _block_bytes(rows, columns, dtype):
    return _round_up(rows, 16) * _round_up(columns, _LANES) * jnp.dtype(dtype).itemsize


def _round_up(size, multiple):
    return -(-size // multiple) * multiple


def _compiler_params(*semantics):
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=_VMEM_LIMIT)


def _cost(flops, arrays):
    """What the compiler cannot see. The operations are the useful ones, without those of masks."""
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    return pl.CostEstimate(flops=flops, bytes_accessed=num_bytes, transcendentals=0)


def _check(lhs, matrices, bias, scale, group_sizes, transposed):
    got = [None if x is None else x.shape for x in (lhs, *matrices, bias, scale, group_sizes)]
    fits = lhs.ndim == 2 and matrices[0].ndim == 3
    if fits:
        num_groups, a, b = matrices[0].shape
        a, b = (b, a) if transposed else (a, b)
        allowed = [(lhs.shape[0], a), *[matrices[0].shape] * len(matrices)]
        allowed += [bias if bias is None else (num_groups, b)]
        allowed += [scale if scale is None else lhs.shape[:1], (num_groups,)]
        fits = got == allowed
    if not fits:
        raise ValueError(
            f"lhs, matrices, bias, scale, group_sizes: got shapes {got}; allowed: [N, a],"
            f" {'[E, b, a]' if transposed else '[E, a, b]'}, [E, b], [N], [E]"
        )
    _check_rows(lhs.shape[0])


def _check_outer(lhs, rhs, group_sizes, scale):
    got = [None if x is None else x.shape for x in (lhs, rhs, group_sizes, scale)]
    fits = (lhs.ndim, rhs.ndim, group_sizes.ndim) == (2, 2, 1) and lhs.shape[0] == rhs.shape[0]
    if not fits or (scale is not None and scale.shape != lhs.shape[:1]):
        raise ValueError(
            f"lhs, rhs, group_sizes, scale: got shapes {got}; allowed: [N, a], [N, b], [E], [N]"
        )
    _check_rows(lhs.shape[0])


def _check_rows(num_rows):
    limit = 2**31 - max(_TILE_ROWS)
    if num_rows >= limit:
        raise ValueError(f"lhs: got {num_rows} rows; allowed: fewer than {limit}, as i32 counts")
