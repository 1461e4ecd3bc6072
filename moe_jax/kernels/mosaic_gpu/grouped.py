"""Grouped matrix products on NVIDIA Hopper, forward only.

As many blocks as the GPU has multiprocessors stay resident and take the tiles of the result in
turn. In each, one warpgroup keeps a ring of shared memory filled by TMA, also while the other two,
the workers, multiply by wgmma or store: each owns 64 rows of the tile and accumulates in float32
registers. The ring passes by two barriers per slot: ``loaded`` and ``free``.

TMA and wgmma want tiles that start at a multiple of eight rows, and groups start anywhere. So a
group's first tile starts up to seven rows early. A product of rows computes the rows of other
groups in its first and last tile for nothing and stores only its own; every row of the result has
one writer. An outer product sets them to zero in shared memory: they may hold NaN. What TMA reads
past an array's end is zero, and the other factor's padding is zero too, so no NaN meets it.

No atomics; a sum's order depends only on the shapes and the group sizes: results are bit-equal
from run to run.

Axis legend: N rows sorted by group, E groups (experts), a and b the inner and outer width of a
product, d model width, f expert width.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from moe_jax.kernels.mosaic_gpu import compat

# Rows and columns of the unit that TMA writes and wgmma reads without bank conflicts.
_SLAB, _LINE = 8, 64
_WORKERS = 2
_ROWS = 64  # of a worker: the height of a wgmma
_TILE = _WORKERS * _ROWS
_CHUNK = (_ROWS, _LINE)  # stored at once
# Neighbouring blocks share rows and matrices in the L2 cache: bands of tiles, down and up.
_BAND = 8
_BLOCKS = 132  # multiprocessors of an H100 SXM; another number costs speed only
# The interpreter runs blocks one by one; each is to have several tiles there too.
_INTERPRETED_BLOCKS = 2
_SHARED_BYTES = 227 * 1024
_STAGING_BYTES = 34 * 1024  # results, scales and barriers
# Of a thread. The three warpgroups start with 168 each; the workers take most of the copier's.
_COPY_REGISTERS, _WORK_REGISTERS = 40, 232
_INDEX_LIMIT = 2**31


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    interpret=False,
) -> jax.Array:
    """(lhs[n] @ rhs[g] + bias[g]) * scale[n], in float32 until the result is rounded.

    Widths that are no multiple of 64 and an N that is no multiple of 8 are padded in a copy.

    Args:
      lhs: bfloat16 or float16[N, a], rows sorted by group; those past the sum of the sizes may
        hold anything.
      rhs: [E, a, b] of lhs's dtype; with ``transposed`` [E, b, a].
      group_sizes: i32[E], sum <= N.
      bias: float[E, b] or None.
      scale: f32[N] or None.
      interpret: see ``compat.interpreter``.

    Returns:
      [N, b] of lhs's dtype; rows past the sum of the sizes are 0.

    Raises:
      ValueError: another dtype, shapes that do not fit, or more than int32 can index.
    """

    def epilogue(products, bias, scale):
        (out,) = products
        out = out if bias is None else out + bias
        return [out if scale is None else out * scale]

    product = _Product(epilogue, num_out=1, transposed=transposed)
    return _multiply_rows(product, lhs, {"rhs": rhs}, group_sizes, bias, scale, interpret)[0]


def hidden(
    lhs: jax.Array,
    w_in: jax.Array,
    w_gate: jax.Array | None,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    *,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """activation(u), or with w_gate activation(v) * u; u = lhs w_in + bias, v = lhs w_gate.

    Args:
      lhs: bfloat16 or float16[N, d], rows sorted by group; those past the sum of the sizes may
        hold anything.
      w_in, w_gate: [E, d, f] of lhs's dtype; w_gate may be None.
      bias: float[E, f] or None.
      group_sizes: i32[E], sum <= N.
      activation: elementwise, applied in float32.
      interpret: see ``compat.interpreter``.

    Returns:
      hidden, u and v (None without w_gate), [N, f] each of lhs's dtype; 0 past the sum.

    Raises:
      ValueError: as in ``matmul``.
    """

    def epilogue(products, bias, _):
        u = products[0] if bias is None else products[0] + bias
        if len(products) == 1:
            return [activation(u), u]
        return [activation(products[1]) * u, u, products[1]]

    activation = compat.inline(activation)
    matrices = {"w_in": w_in} if w_gate is None else {"w_in": w_in, "w_gate": w_gate}
    product = _Product(epilogue, num_out=1 + len(matrices))
    outs = _multiply_rows(product, lhs, matrices, group_sizes, bias, None, interpret)
    return (*outs, None) if w_gate is None else tuple(outs)


def outer(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    dtype: DTypeLike,
    interpret=False,
) -> jax.Array:
    """Sum over the rows n of each group of scale[n] * lhs[n] x rhs[n], accumulated in float32.

    scale[n] * lhs[n] is rounded to lhs's dtype. Padded in a copy as in ``matmul``.

    Args:
      lhs: bfloat16 or float16[N, a].  rhs: [N, b] of lhs's dtype.  Both may hold anything past
        the sum of the sizes.
      group_sizes: i32[E], sum <= N.
      scale: f32[N] or None.
      dtype: of the result: bfloat16, float16 or float32.
      interpret: see ``compat.interpreter``.

    Returns:
      [E, a, b]; exactly 0 for an empty group.

    Raises:
      ValueError: as in ``matmul``.
    """
    _check_dtypes({"lhs": lhs, "rhs": rhs})
    _check_shapes({"lhs": (lhs, ("N", "a")), "rhs": (rhs, ("N", "b"))})
    (num_rows, left), right, num_groups = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    _check_shapes({"rhs": (rhs, (num_rows, "b")), "scale": (scale, (num_rows,))})
    if 0 in (num_rows, left, right, num_groups):
        return jnp.zeros((num_groups, left, right), dtype)
    if scale is not None:
        lhs = (lhs * scale[:, None]).astype(lhs.dtype)
    out = _outer(
        _pad(lhs, _SLAB, _LINE), _pad(rhs, _SLAB, _LINE), group_sizes, jnp.dtype(dtype), interpret
    )
    return out[:, :left, :right]


class _Product(NamedTuple):
    """What is static in the kernel of a product of rows; the later fields follow from shapes.

    Attributes:
      epilogue: (float32 products, bias and scale, each None or of their shape) -> the results.
      num_out: number of results.
      transposed: whether the matrices are [E, b, a].
      num_groups, num_steps, tile_width, num_columns, stages: E, steps of a tile, width of a tile
        of each product, tiles side by side, and slots of the ring.
    """

    epilogue: Callable
    num_out: int
    transposed: bool = False
    num_groups: int = 0
    num_steps: int = 0
    tile_width: int = 0
    num_columns: int = 0
    stages: int = 0


def _multiply_rows(product, lhs, matrices, group_sizes, bias, scale, interpret):
    """Checks and pads for ``_multiply_padded_rows``, and cuts its results."""
    _check_dtypes({"lhs": lhs, **matrices})
    _check_shapes({"lhs": (lhs, ("N", "a")), "group_sizes": (group_sizes, ("E",))})
    (num_rows, inner), (num_groups,) = lhs.shape, group_sizes.shape
    first, axis = next(iter(matrices.values())), 1 if product.transposed else 2
    width = first.shape[axis] if first.ndim == 3 else "b"
    matrix = (num_groups, width, inner) if product.transposed else (num_groups, inner, width)
    shapes = {name: (array, matrix) for name, array in matrices.items()}
    shapes |= {"bias": (bias, (num_groups, width)), "scale": (scale, (num_rows,))}
    _check_shapes(shapes)
    if num_rows == 0:
        return [jnp.zeros((0, width), lhs.dtype)] * product.num_out
    if 0 in matrix:
        raise ValueError(f"matrices: got shape {matrix}; allowed: sizes > 0")
    outs = _multiply_padded_rows(
        product,
        _pad(lhs, _SLAB, _LINE),
        [_pad(array, 1, _LINE, _LINE) for array in matrices.values()],
        group_sizes,
        None if bias is None else _pad(bias, 1, _LINE),
        None if scale is None else _pad(scale, _SLAB),
        interpret,
    )
    return [out[:num_rows, :width] for out in outs]


def _multiply_padded_rows(product, lhs, matrices, group_sizes, bias, scale, interpret):
    (num_rows, inner), dtype, count = lhs.shape, lhs.dtype, len(matrices)
    width = matrices[0].shape[1 if product.transposed else 2]
    tile_width, stages = _tiling(width, count, 0 if bias is None else bias.dtype.itemsize)
    product = product._replace(
        num_groups=group_sizes.shape[0],
        num_steps=pl.cdiv(inner, _LINE),
        tile_width=tile_width,
        num_columns=pl.cdiv(width, tile_width),
        stages=stages,
    )
    bounds = _group_bounds(group_sizes, num_rows)
    tiles = _row_tiles(*bounds, num_rows)
    _check_index(rows=num_rows + _TILE, tiles=tiles[1].size * product.num_columns)

    matrix_tile = (tile_width, _LINE) if product.transposed else (_LINE, tile_width)
    vectors = {}
    if bias is not None:
        vectors["bias_tile"] = plgpu.SMEM((_WORKERS, tile_width), bias.dtype)
    if scale is not None:
        vectors["scale_tile"] = plgpu.SMEM((_WORKERS, _ROWS), scale.dtype)
    if vectors:
        vectors["copied"] = plgpu.Barrier(num_arrivals=len(vectors), num_barriers=_WORKERS)
    return _call(
        "multiply_rows",
        functools.partial(_rows_kernel, product),
        [jax.ShapeDtypeStruct((num_rows, width), dtype)] * product.num_out,
        {
            "lhs_tiles": _swizzled((stages, _TILE, _LINE), dtype),
            "matrix_tiles": [_swizzled((stages, *matrix_tile), dtype)] * count,
            "whole": _swizzled((_WORKERS, *_CHUNK), dtype),
            "partial": plgpu.SMEM((_WORKERS, *_CHUNK), dtype),
            "loaded": plgpu.Barrier(num_arrivals=1 + count, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=stages),
            **vectors,
        },
        interpret,
    )(*tiles, *bounds, lhs, matrices, bias, scale)


def _rows_kernel(
    product, used, group_of, first_of, start_of, end_of, lhs, matrices, bias, scale, *outs,
    lhs_tiles, matrix_tiles, loaded, free, **staging,
):  # fmt: skip
    worker = lax.axis_index("worker")
    transposed, tile_width = product.transposed, product.tile_width

    def describe(number):
        shape = (used[0], product.num_columns)
        row_tile, column = plgpu.planar_snake(number, shape, 1, _BAND)
        group = group_of[row_tile]
        # Rows past the sum are the last group: its tiles multiply nothing and store zeros.
        steps = jnp.where(group < product.num_groups, product.num_steps, 0)
        return steps, group, pl.multiple_of(first_of[row_tile], _SLAB), column * tile_width

    def load(tile, step, slot):
        _, group, first, column = tile
        summed, columns = pl.ds(step * _LINE, _LINE), pl.ds(column, tile_width)
        rows = lhs.at[pl.ds(first, _TILE), summed]
        plgpu.copy_gmem_to_smem(rows, lhs_tiles.at[slot], loaded.at[slot])
        for matrix, tiles in zip(matrices, matrix_tiles, strict=True):
            block = (columns, summed) if transposed else (summed, columns)
            plgpu.copy_gmem_to_smem(matrix.at[(group, *block)], tiles.at[slot], loaded.at[slot])

    def multiply(tile, step, slot, accumulators):
        left = lhs_tiles.at[slot, _of_worker(worker)]
        for accumulator, tiles in zip(accumulators, matrix_tiles, strict=True):
            right = tiles.at[slot]
            plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if transposed else right)

    def finish(tile, products):
        steps, group, first, column = tile
        first = pl.multiple_of(first + worker * _ROWS, _SLAB)
        skip = jnp.clip(start_of[group] - first, 0, _ROWS)
        count = jnp.clip(end_of[group] - first, 0, _ROWS) - skip
        bias_row = scale_rows = None
        if bias is not None:
            row = jnp.minimum(group, product.num_groups - 1)
            bias_row = bias.at[row, pl.ds(column, tile_width)]
        if scale is not None:
            scale_rows = scale.at[pl.ds(first, _ROWS)]
        staged = {name: ref.at[worker] for name, ref in staging.items()}
        results = _chunks_of_rows(product, products, steps > 0, bias_row, scale_rows, staged)
        for left, chunk in results:
            for value, out in zip(chunk, outs, strict=True):
                out = out.at[:, pl.ds(column + left, _LINE)]
                _store_rows(value.astype(out.dtype), out, first, skip, count, staged)

    accumulators = [plgpu.ACC((_ROWS, tile_width), jnp.float32)] * len(matrices)
    num_tiles = used[0] * product.num_columns
    _persistent(num_tiles, describe, load, multiply, finish, accumulators, loaded, free)


def _chunks_of_rows(product, products, live, bias, scale, staged):
    """The epilogue by chunks: registers do not hold the accumulators and all results.

    Args:
      product: a ``_Product``.
      products: float32[64, tile_width] each.
      live: whether the rows belong to a group.
      bias, scale: GMEM refs of the columns' bias and the rows' scale, or None.
      staged: the worker's staging memory.

    Yields:
      The chunk's first column in the tile and its results, float32[64, 64] each.
    """
    if bias is not None or scale is not None:
        # The copies may not overtake the reads of the last tile's vectors.
        plgpu.commit_smem()
        if bias is not None:
            plgpu.copy_gmem_to_smem(bias, staged["bias_tile"], staged["copied"])
        if scale is not None:
            plgpu.copy_gmem_to_smem(scale, staged["scale_tile"], staged["copied"])
        plgpu.barrier_wait(staged["copied"])

    def spread(vector, axis):
        return lax.broadcast_in_dim(vector[...].astype(jnp.float32), _CHUNK, (axis,))

    live = lax.broadcast(live, _CHUNK)
    for left in range(0, product.tile_width, _LINE):
        columns = slice(left, left + _LINE)
        chunk = [each[:, columns] for each in products]
        row = None if bias is None else spread(staged["bias_tile"].at[columns], 1)
        factor = None if scale is None else spread(staged["scale_tile"], 0)
        results = product.epilogue(chunk, row, factor)
        yield left, [jnp.where(live, value, jnp.zeros_like(value)) for value in results]


def _outer(lhs, rhs, group_sizes, dtype, interpret):
    (num_rows, left), right, num_groups = lhs.shape, rhs.shape[1], group_sizes.shape[0]
    tile_width, stages = _tiling(right, 1)
    num_tiles = num_groups * pl.cdiv(left, _TILE) * pl.cdiv(right, tile_width)
    _check_index(rows=num_rows + _TILE, tiles=num_tiles)
    return _call(
        "outer",
        _outer_kernel,
        jax.ShapeDtypeStruct((num_groups, left, right), dtype),
        {
            "lhs_tiles": _swizzled((stages, _LINE, _TILE), lhs.dtype),
            "rhs_tiles": _swizzled((stages, _LINE, tile_width), rhs.dtype),
            "whole": _swizzled((_WORKERS, _ROWS, 128 // dtype.itemsize), dtype),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=stages),
            "zeroed": plgpu.Barrier(num_arrivals=_WORKERS),
        },
        interpret,
    )(*_group_bounds(group_sizes, num_rows), lhs, rhs)


def _outer_kernel(
    start_of, end_of, lhs, rhs, out, *, lhs_tiles, rhs_tiles, whole, loaded, free, zeroed
):
    worker = lax.axis_index("worker")
    mine = _of_worker(worker)
    num_groups, left, right = out.shape
    tile_width = rhs_tiles.shape[2]
    shape = (pl.cdiv(left, _TILE), pl.cdiv(right, tile_width))

    def describe(number):
        group, number = lax.div(number, shape[0] * shape[1]), lax.rem(number, shape[0] * shape[1])
        row, column = plgpu.planar_snake(number, shape, 1, _BAND)
        start, end = start_of[group], end_of[group]
        first = lax.div(start, _SLAB) * _SLAB
        steps = jnp.where(end > start, pl.cdiv(end - first, _LINE), 0)
        return steps, group, first, start, end, row * _TILE, column * tile_width

    def load(tile, step, slot):
        _, _, first, _, _, row, column = tile
        summed = pl.ds(pl.multiple_of(first + step * _LINE, _SLAB), _LINE)
        block = lhs.at[summed, pl.ds(row, _TILE)]
        plgpu.copy_gmem_to_smem(block, lhs_tiles.at[slot], loaded.at[slot])
        block = rhs.at[summed, pl.ds(column, tile_width)]
        plgpu.copy_gmem_to_smem(block, rhs_tiles.at[slot], loaded.at[slot])

    def multiply(tile, step, slot, accumulators):
        _, _, first, start, end, _, _ = tile
        low, high = start - first - step * _LINE, end - first - step * _LINE

        # The first and the last step of a group. Each worker zeroes the part of lhs that it alone
        # reads and half of rhs, which both read.
        @pl.when((low > 0) | (high < _LINE))
        def _():
            half = tile_width // _WORKERS
            half = pl.ds(pl.multiple_of(worker * half, half), half)
            _keep_rows(lhs_tiles.at[slot, :, mine], low, high)
            _keep_rows(rhs_tiles.at[slot, :, half], low, high)
            plgpu.commit_smem()
            plgpu.barrier_arrive(zeroed)
            plgpu.barrier_wait(zeroed)

        transposed = lhs_tiles.at[slot, :, mine].transpose((1, 0))
        plgpu.wgmma(accumulators[0], transposed, rhs_tiles.at[slot])

    def finish(tile, products):
        _, group, _, _, _, row, column = tile
        rows = pl.ds(pl.multiple_of(row + worker * _ROWS, _ROWS), _ROWS)
        value, line = products[0].astype(out.dtype), whole.shape[2]
        for begin in range(0, tile_width, line):
            block = out.at[group, rows, pl.ds(column + begin, line)]
            _store(value[:, begin : begin + line], block, whole.at[worker])

    accumulators = [plgpu.ACC((_ROWS, tile_width), jnp.float32)]
    num_tiles = num_groups * shape[0] * shape[1]
    _persistent(num_tiles, describe, load, multiply, finish, accumulators, loaded, free)


def _persistent(num_tiles, describe, load, multiply, finish, accumulators, loaded, free):
    """The loop of each warpgroup over the tiles of its block and their steps.

    Args:
      num_tiles: how many tiles all blocks have together.
      describe: tile number -> a tuple with the tile's number of steps first.
      load: (tile, step, slot) starts the copies of a step, which arrive at loaded[slot].
      multiply: (tile, step, slot, accumulators) starts one wgmma per accumulator.
      finish: (tile, values of the accumulators) stores.
      accumulators: types of a worker's accumulators.
      loaded, free: barriers, one of each per slot of the ring.
    """
    worker, block = lax.axis_index("worker"), lax.axis_index("block")
    num_blocks, stages = lax.axis_size("block"), loaded.shape[0]

    def for_each_tile(one):
        """Runs one(tile, steps of the tiles before); returns the number of all steps."""

        def body(i, done):
            tile = describe(block + i * num_blocks)
            one(tile, done)
            return done + tile[0]

        return lax.fori_loop(0, pl.cdiv(num_tiles - block, num_blocks), body, jnp.int32(0))

    @pl.when(worker == _WORKERS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

        def copy(tile, done):
            @pl.loop(0, tile[0])
            def _(step):
                slot = lax.rem(done + step, stages)
                pl.when(done + step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                load(tile, step, slot)

        done = for_each_tile(copy)
        # Every arrival is waited for, as a barrier's life has to end.
        for slot in range(stages):
            pl.when(slot < done)(functools.partial(plgpu.barrier_wait, free.at[slot]))

    @pl.when(worker < _WORKERS)
    def _():
        plgpu.set_max_registers(_WORK_REGISTERS, action="increase")

        def compute(tile, done):
            def release(step):
                plgpu.barrier_arrive(free.at[lax.rem(done + step, stages)])

            def products(*accumulators):
                @pl.loop(0, tile[0])
                def _(step):
                    slot = lax.rem(done + step, stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    multiply(tile, step, slot, accumulators)
                    # This step's wgmmas may run on; the last step's have read their slot.
                    plgpu.wgmma_wait(len(accumulators))
                    pl.when(step > 0)(lambda: release(step - 1))

                return [accumulator[...] for accumulator in accumulators]

            values = pl.run_scoped(products, *accumulators)
            pl.when(tile[0] > 0)(lambda: release(tile[0] - 1))
            finish(tile, values)

        for_each_tile(compute)
        plgpu.wait_smem_to_gmem(0)


def _store(values, out, staging):
    # The copy before has read the staging memory.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out)


def _store_rows(values, out, first, skip, count, staged):
    """Stores ``count`` of a worker's rows, from row ``skip``, to rows ``first`` + skip of out."""
    whole, partial = staged["whole"], staged["partial"]
    pl.when(count == _ROWS)(lambda: _store(values, out.at[pl.ds(first, _ROWS)], whole))

    # A copy's size is static: one copy per bit of the count. ``whole`` is swizzled, which allows
    # only multiples of eight rows; ``partial`` is not.
    @pl.when((count > 0) & (count < _ROWS))
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        partial[...] = values
        plgpu.commit_smem()
        row, size = skip, _ROWS // 2
        while size:
            source, target = partial.at[pl.ds(row, size)], out.at[pl.ds(first + row, size)]
            pl.when(count & size != 0)(functools.partial(plgpu.copy_smem_to_gmem, source, target))
            row, size = row + (count & size), size // 2


def _keep_rows(ref, low, high):
    """Zeroes the rows of shared memory outside [low, high)."""
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    ref[...] = jnp.where((row >= low) & (row < high), ref[...], jnp.zeros(ref.shape, ref.dtype))


def _of_worker(worker):
    return pl.ds(pl.multiple_of(worker * _ROWS, _ROWS), _ROWS)


def _group_bounds(group_sizes, num_rows):
    """First row of each group and the row after its last; the rows past the sum are group E."""
    end = jnp.append(jnp.cumsum(group_sizes), num_rows).astype(jnp.int32)
    return jnp.append(0, end[:-1]).astype(jnp.int32), end


def _row_tiles(start, end, num_rows):
    """How many row tiles there are [1], and each one's group and first row."""
    first = start // _SLAB * _SLAB
    tiles = jnp.where(end > start, pl.cdiv(end - first, _TILE), 0)
    last = jnp.cumsum(tiles)
    most = (num_rows + (_SLAB - 1 + _TILE - 1) * start.size) // _TILE
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(last, number, side="right", method="compare_all")
    group = jnp.minimum(group, start.size - 1).astype(jnp.int32)
    return last[-1:], group, first[group] + (number - (last - tiles)[group]) * _TILE


def _tiling(width, count, bias_bytes=0):
    """Width of a tile of each of ``count`` products, by what copies least, and slots of the ring.

    ``bias_bytes`` are those of one element of the bias.
    """
    tile = min(
        (256 // count, 128 // count),
        key=lambda tile: pl.cdiv(width, tile) * (_TILE + count * tile),
    )
    stage_bytes = 2 * _LINE * (_TILE + count * tile)
    free_bytes = _SHARED_BYTES - _STAGING_BYTES - _WORKERS * tile * bias_bytes
    return tile, min(free_bytes // stage_bytes, 6)


def _swizzled(shape, dtype):
    line = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((_SLAB, line)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _call(name, body, out_type, scratch_types, interpret):
    return compat.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(_INTERPRETED_BLOCKS if interpret else _BLOCKS,),
        grid_names=("block",),
        num_threads=_WORKERS + 1,
        thread_name="worker",
        kernel_name=f"grouped_{name}",
        interpret=interpret,
    )


def _pad(array, *multiples):
    """Zeros after the end of each axis, up to a multiple."""
    padding = [(0, -size % multiple) for size, multiple in zip(array.shape, multiples, strict=True)]
    return jnp.pad(array, padding) if any(after for _, after in padding) else array


def _check_dtypes(arrays):
    allowed = (jnp.bfloat16, jnp.float16)
    first = next(iter(arrays.values()))
    for name, array in arrays.items():
        if array.dtype not in allowed or array.dtype != first.dtype:
            raise ValueError(
                f"{name}: got {array.dtype}; allowed: bfloat16 or float16, the same for all "
                "(wgmma would round float32 to tf32)"
            )


def _check_shapes(arrays):
    """Raises unless each array is None or has the shape; a name in a shape is any size."""
    for name, (array, shape) in arrays.items():
        if array is None:
            continue
        sizes = zip(array.shape, shape, strict=False)
        fits = all(got == size or isinstance(size, str) for got, size in sizes)
        if not fits or array.ndim != len(shape):
            allowed = ", ".join(map(str, shape))
            raise ValueError(f"{name}: got shape {array.shape}; allowed: [{allowed}]")


def _check_index(**sizes):
    for name, size in sizes.items():
        if size >= _INDEX_LIMIT:
            raise ValueError(f"{name}: got {size}; allowed: less than {_INDEX_LIMIT}")
