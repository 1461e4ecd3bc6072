"""Rows read by index on NVIDIA Hopper: gather, combine and the gradient of combine's gates.

A warpgroup holds a row, or a block of its columns, in the registers of its 128 threads, and
reads and writes it in vectors of up to 16 bytes, neighbouring threads neighbouring vectors.
Shared memory has no part in it, as only one warpgroup needs a row; the many that run on an SM
hide each other's latency. Each element of a result is the work of one warpgroup in a fixed order:
no atomics, and every run gives the same bits.

A row that does not exist is never read: the last one is, in its place, and masked away. Widths
that are no multiple of 128 are padded with zeros before the kernel, which copies the operands.

Axis legend: see ``moe_jax.kernels.backend``; c columns of a block, one row of it per warpgroup.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.mosaic_gpu import compat

_THREADS = 128
# Rows in flight per warpgroup, and their columns at most: 64 registers per thread in float32.
_ROWS = 4
_MAX_COLUMNS = 2048
_VECTOR_BYTES = 16


def gather(
    x: jax.Array, token: jax.Array, *, scale: jax.Array | None = None, interpret=False
) -> jax.Array:
    """x[token[n]] * scale[n], 0 where token[n] is T or more.

    Args:
      x: float[T, d].  token: i32[N], >= 0.  scale: f32[N] or None.
      interpret: as in ``compat.interpreter``.

    Returns:
      [N, d] of x's dtype.
    """
    (num_tokens, width), num_rows = x.shape, token.shape[0]
    if not (x.size and num_rows):
        return jnp.zeros((num_rows, width), x.dtype)
    x = _pad(x)
    num_columns = _columns(x.shape[1])
    per_row = x.shape[1] // num_columns
    layout = _layout(num_columns, x.dtype)

    def gather_block(x_ref, token_ref, *refs):
        *scale_ref, out_ref = refs
        rows, columns = _place(num_rows, per_row, num_columns)
        out = []
        for n in rows:
            index = token_ref[n]
            row = _read(x_ref, index, columns, layout)
            if scale_ref:
                # A scale of no row may be anything.
                factor = jnp.where(index < num_tokens, scale_ref[0][n], 0.0)
                row = (row.astype(jnp.float32) * factor).astype(row.dtype)
            out.append(row)
        # Only now: a store ends the freedom to move the next row's loads up.
        for n, row in zip(rows, out, strict=True):
            out_ref[n, columns] = row

    operands = (x, token) if scale is None else (x, token, scale)
    out_type = jax.ShapeDtypeStruct((num_rows, x.shape[1]), x.dtype)
    num_blocks = pl.cdiv(num_rows, _ROWS) * per_row
    return _kernel(gather_block, out_type, num_blocks, interpret)(*operands)[:, :width]


def combine(
    rows: jax.Array, row: jax.Array, *, gate: jax.Array | None = None, interpret=False
) -> jax.Array:
    """Sum over j of gate[t, j] * rows[row[t, j]], in float32 and in the order of j.

    Args:
      rows: float[N, d].  row: i32[T, K]; a slot with row >= N adds exactly 0, whatever its gate.
      gate: f32[T, K]; None means 1.
      interpret: as in ``compat.interpreter``.

    Returns:
      [T, d] of the rows' dtype.
    """
    (num_rows, width), (num_tokens, num_slots) = rows.shape, row.shape
    if not (rows.size and row.size):
        return jnp.zeros((num_tokens, width), rows.dtype)
    rows = _pad(rows)
    num_columns = _columns(rows.shape[1])
    per_row = rows.shape[1] // num_columns
    layout = _layout(num_columns, rows.dtype)

    def combine_block(rows_ref, row_ref, *refs):
        *gate_ref, out_ref = refs
        tokens, columns = _place(num_tokens, per_row, num_columns)

        def term(t, j):
            index = row_ref[t, j]
            term = _read(rows_ref, index, columns, layout).astype(jnp.float32)
            if not gate_ref:
                return term
            # A gate of an empty slot may be anything.
            return term * jnp.where(index < num_rows, gate_ref[0][t, j], 0.0)

        sums = lax.fori_loop(
            0,
            num_slots,
            lambda j, sums: [s + term(t, j) for s, t in zip(sums, tokens, strict=True)],
            [_zeros(num_columns, layout)] * _ROWS,
        )
        for t, total in zip(tokens, sums, strict=True):
            out_ref[t, columns] = total.astype(out_ref.dtype)

    operands = (rows, row) if gate is None else (rows, row, gate)
    out_type = jax.ShapeDtypeStruct((num_tokens, rows.shape[1]), rows.dtype)
    num_blocks = pl.cdiv(num_tokens, _ROWS) * per_row
    return _kernel(combine_block, out_type, num_blocks, interpret)(*operands)[:, :width]


def gate_gradient(
    cotangent: jax.Array, rows: jax.Array, row: jax.Array, *, interpret=False
) -> jax.Array:
    """f32[T, K]: cotangent[t] . rows[row[t, j]] in float32, 0 for a slot with row >= N.

    Args:
      cotangent: float[T, d].  rows: float[N, d].  row: i32[T, K].
      interpret: as in ``compat.interpreter``.
    """
    num_rows, (num_tokens, num_slots) = rows.shape[0], row.shape
    if not (rows.size and row.size):
        return jnp.zeros(row.shape, jnp.float32)
    cotangent, rows = _pad(cotangent), _pad(rows)
    num_columns = _columns(rows.shape[1])
    # One layout for both: a product needs its factors in the same threads.
    layout = _layout(num_columns, jnp.promote_types(cotangent.dtype, rows.dtype))

    def gate_gradient_block(cotangent_ref, rows_ref, row_ref, out_ref):
        t = lax.axis_index("block")

        def dot(j, carry):
            index = row_ref[t, j]

            def add(i, products):
                columns = pl.ds(i * num_columns, num_columns)
                left = _read(cotangent_ref, t, columns, layout).astype(jnp.float32)
                right = _read(rows_ref, index, columns, layout).astype(jnp.float32)
                return products + left * right

            products = lax.fori_loop(
                0, rows.shape[1] // num_columns, add, _zeros(num_columns, layout)
            )
            # Masked here again: the cotangent may not be finite.
            out_ref[t, j] = jnp.where(index < num_rows, jnp.sum(products), 0.0)
            return carry

        lax.fori_loop(0, num_slots, dot, None)

    out_type = jax.ShapeDtypeStruct(row.shape, jnp.float32)
    return _kernel(gate_gradient_block, out_type, num_tokens, interpret)(cotangent, rows, row)


def _kernel(body, out_type, num_blocks, interpret):
    """A kernel of blocks of one warpgroup.

    The layouts are all written down here, so the lanes are lowered as they are: inferring the
    layouts of a whole warpgroup takes minutes for some shapes. Barriers around stores would only
    slow it down: no kernel here reads what it writes.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        # One axis: the others of a CUDA grid end at 65535.
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=compat.interpreter(interpret),
    )


def _pad(x):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _THREADS)))


def _columns(width):
    """The widest block that divides the width: all blocks are alike."""
    sizes = range(_MAX_COLUMNS, 0, -_THREADS)
    return next(size for size in sizes if width % size == 0)


def _layout(num_columns, dtype):
    size = _VECTOR_BYTES // jnp.dtype(dtype).itemsize
    while num_columns % (size * _THREADS):
        size //= 2
    return plgpu.Layout.WG_STRIDED((num_columns,), size)


def _place(num_rows, per_row, num_columns):
    """This block's rows and columns; past the end, the last row once more, with the same values."""
    block = lax.axis_index("block")
    first = block // per_row * _ROWS
    rows = [jnp.minimum(first + i, num_rows - 1) for i in range(_ROWS)]
    return rows, pl.ds(block % per_row * num_columns, num_columns)


def _read(ref, index, columns, layout):
    """[c]: the columns of one row, 0 if there is no such row."""
    last = ref.shape[0] - 1
    row = plgpu.layout_cast(ref[jnp.minimum(index, last), columns], layout)
    return jnp.where(index <= last, row, jnp.zeros_like(row))


def _zeros(num_columns, layout):
    return plgpu.layout_cast(jnp.zeros(num_columns, jnp.float32), layout)
