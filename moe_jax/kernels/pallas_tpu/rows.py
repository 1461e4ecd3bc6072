"""Gather, combine and the gradient of gates on TPU: rows come from HBM by one DMA each.

All three are one pattern. For every tile of tokens the K rows of each token are fetched into VMEM,
and while the vector unit sums or multiplies the rows of one tile, those of the next are on their
way. A token belongs to one tile and its rows are added in the order of its slots, so there are no
atomics and every run gives the same bits. A gather is a combine with one slot.

A DMA can take a single row of a matrix only if its elements have 32 bits: bfloat16 rows share their
words with their neighbours. So those are packed first, in a pass that moves as many bytes: a word
holds a column of the left half and one of the right half, and is unpacked with a shift. The same
pass fills the width up to whole vectors of 128 words.

Axis legend: T tokens, K slots per token, N rows, d model width; t tokens per tile, w words per row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels.manual import result_type

_LANES = 128
# Tokens that the vector unit handles at a time: whole registers of float32 and of bfloat16.
_CHUNK = 16
# Tokens whose requests the scalar unit interleaves.
_UNROLL = 4
_LARGEST_TILE = 256
_TILE_BYTES = 8 * 2**20
# More than the compiler allows by default, for rows so wide that even the smallest tile needs it.
_VMEM_BYTES = 48 * 2**20


def gather(x, token, *, scale=None, interpret=False):
    """x[token[n]] * scale[n], exactly 0 where token[n] is T or more.

    Args:
      x: float32 or bfloat16 [T, d].  token: i32[N], >= 0.  scale: f32[N] or None.
      interpret: as in ``pallas_call``.

    Returns:
      [N, d] of x's dtype.

    Raises:
      ValueError: another dtype.
    """
    scale = None if scale is None else scale[:, None]
    return combine(x, token[:, None], gate=scale, interpret=interpret)


def combine(rows, row, *, gate=None, interpret=False):
    """Sum over j of gate[t, j] * rows[row[t, j]], in float32 and in the order of j.

    Args:
      rows: float32 or bfloat16 [N, d].
      row: i32[T, K], >= 0; a slot with row >= N adds exactly 0, whatever its gate.
      gate: f32[T, K]; None means 1.
      interpret: as in ``pallas_call``.

    Returns:
      [T, d] of the rows' dtype.

    Raises:
      ValueError: another dtype.
    """
    _check_dtype("rows", rows)
    out = result_type((row.shape[0], rows.shape[1]), rows.dtype, rows, row)
    if not rows.size or not row.size:
        return jnp.zeros(out.shape, out.dtype)
    gate = jnp.ones(row.shape) if gate is None else gate
    tile = _tile_tokens(rows, row)
    gate = _by_tile(gate.astype(jnp.float32), tile)
    return _for_each_tile(_combine_tile, rows, row, gate, out, tile, interpret)


def gate_gradient(cotangent, rows, row, *, interpret=False):
    """f32[T, K]: cotangent[t] . rows[row[t, j]] in float32, exactly 0 for a slot with row >= N.

    Args:
      cotangent, rows: float32 or bfloat16 [T, d] and [N, d].
      row: i32[T, K], >= 0.
      interpret: as in ``pallas_call``.

    Raises:
      ValueError: another dtype.
    """
    _check_dtype("cotangent", cotangent)
    _check_dtype("rows", rows)
    num_tokens, num_slots = row.shape
    if not rows.size or not row.size:
        return jnp.zeros(row.shape, jnp.float32)
    tile = _tile_tokens(rows, row)
    shape = pl.cdiv(num_tokens, tile), num_slots, tile
    out = result_type(shape, jnp.float32, cotangent, rows, row)
    dots = _for_each_tile(_dot_tile, rows, row, cotangent, out, tile, interpret)
    return dots.swapaxes(1, 2).reshape(-1, num_slots)[:num_tokens]


def _for_each_tile(compute, rows, row, operand, out, tile, interpret):
    """Runs compute(fetch, exists, operand, out, scratch) on every tile.

    fetch(j, tokens) are float32 rows, exists i32[t, K] tells which of them count, and scratch is
    f32[t, K]. Operand and out are [T, d] or, one number per slot, [T / t, K, t]: with tokens along
    the lanes, for K columns would fill 128 lanes in HBM.
    """
    words = _pack(rows)
    num_slots = row.shape[1]
    exists = _by_tile((row < rows.shape[0]).astype(jnp.int32), tile)
    # Some row is fetched for every slot: a branch for each would cost more than it saves.
    index = _by_tile(jnp.minimum(row, rows.shape[0] - 1), tile)
    last = index.shape[0] - 1

    def block(array, tile_number=lambda i: i, **options):
        if len(array.shape) == 2:
            return pl.BlockSpec((tile, array.shape[1]), lambda i: (tile_number(i), 0))
        shape = (1, num_slots, tile)
        return pl.BlockSpec(shape, lambda i: (tile_number(i), 0, 0), **options)

    call = pl.pallas_call(
        functools.partial(_kernel, compute, rows.shape[1]),
        out,
        grid=(last + 1,),
        in_specs=[
            block(index, memory_space=pltpu.SMEM),
            block(index, lambda i: jnp.minimum(i + 1, last), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            block(exists),
            block(operand),
        ],
        out_specs=block(out),
        scratch_shapes=[
            pltpu.VMEM((tile, num_slots), jnp.int32),
            pltpu.VMEM((tile, num_slots), jnp.float32),
            pltpu.VMEM((2, num_slots, tile, words.shape[1]), words.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            # In order: the rows of a tile are requested while the tile before is computed.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=interpret,
    )
    return call(index, index, words, exists, operand)


def _kernel(
    compute,
    width,
    index,
    next_index,
    rows,
    exists_by_lane,
    operand,
    out,
    exists,
    scratch,
    buffers,
    semaphores,
):
    step = pl.program_id(0)
    mine = jax.lax.rem(step, 2)
    other = 1 - mine

    @pl.when(step == 0)
    def _():
        _start(index, rows, buffers.at[mine], semaphores.at[mine])

    # The other buffer is free: its tile was computed in the step before.
    @pl.when(step + 1 < pl.num_programs(0))
    def _():
        _start(next_index, rows, buffers.at[other], semaphores.at[other])

    exists[...] = exists_by_lane[0].T
    # The semaphore counts bytes: this waits for all rows of the tile at once.
    pltpu.make_async_copy(buffers.at[mine], buffers.at[mine], semaphores.at[mine]).wait()

    def fetch(j, tokens):
        return _unpack(buffers[mine, j, tokens], width)

    compute(fetch, exists, operand, out, scratch)


def _start(index, rows, buffer, semaphore):
    """Requests the rows of a tile."""
    _, num_slots, tile = index.shape

    def token(t, _):
        for j in range(num_slots):
            source = rows.at[pl.ds(index[0, j, t], 1)]
            pltpu.make_async_copy(source, buffer.at[j, pl.ds(t, 1)], semaphore).start()

    jax.lax.fori_loop(0, tile, token, None, unroll=_UNROLL)


def _combine_tile(fetch, exists, gate_by_lane, out, gate):
    gate[...] = gate_by_lane[0].T

    def chunk(tokens):
        total = None
        for j in range(gate.shape[1]):
            slot = tokens, slice(j, j + 1)
            # Not a product with 0: neither the gate nor the row need be finite.
            term = jnp.where(exists[slot] > 0, fetch(j, tokens) * gate[slot], 0)
            total = term if total is None else total + term
        out[tokens] = total.astype(out.dtype)

    _for_each_chunk(gate.shape[0], chunk)


def _dot_tile(fetch, exists, cotangent, out, dots):
    def chunk(tokens):
        left = cotangent[tokens].astype(jnp.float32)
        for j in range(dots.shape[1]):
            slot = tokens, slice(j, j + 1)
            dot = jnp.sum(left * fetch(j, tokens), axis=1, keepdims=True)
            dots[slot] = jnp.where(exists[slot] > 0, dot, 0)

    _for_each_chunk(dots.shape[0], chunk)
    out[0] = dots[...].T


def _for_each_chunk(tile, function):
    def chunk(c, _):
        function(pl.ds(pl.multiple_of(c * _CHUNK, _CHUNK), _CHUNK))

    jax.lax.fori_loop(0, tile // _CHUNK, chunk, None)


def _pack(rows):
    """Rows as 32-bit words [N, w], w a multiple of 128; two columns of bfloat16 per word."""
    width = _words_per_row(rows)
    if rows.dtype == jnp.float32:
        return _fill_up(rows, width)
    # Cut before it is widened: XLA makes one pass of it and stores no halves.
    left, right = _fill_up(rows[:, :width], width), _fill_up(rows[:, width:], width)
    left, right = (jax.lax.bitcast_convert_type(half, jnp.uint16) for half in (left, right))
    return left.astype(jnp.uint32) | right.astype(jnp.uint32) << 16


def _unpack(words, width):
    """The first ``width`` columns of packed rows, in float32."""
    if words.dtype == jnp.uint32:
        # A bfloat16 is the upper half of a float32.
        halves = words << 16, words & jnp.uint32(0xFFFF0000)
        halves = [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]
        words = jnp.concatenate(halves, axis=1)
    return words[:, :width]


def _words_per_row(rows):
    columns_per_word = 4 // rows.dtype.itemsize
    return pl.cdiv(rows.shape[1], columns_per_word * _LANES) * _LANES


def _fill_up(rows, width):
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _tile_tokens(rows, row):
    """How many tokens make a tile: their rows, twice, and both sides of the tile fit into VMEM."""
    (num_tokens, num_slots), width = row.shape, _words_per_row(rows)
    bytes_per_token = 4 * 2 * (num_slots * width + rows.shape[1])
    tile = min(_LARGEST_TILE, num_tokens, _TILE_BYTES // bytes_per_token)
    return max(pl.cdiv(tile, _CHUNK), 1) * _CHUNK


def _by_tile(slots, tile):
    """[T, K] to [T / t, K, t], the last tile filled up with 0."""
    num_tokens, num_slots = slots.shape
    slots = jnp.pad(slots, ((0, -num_tokens % tile), (0, 0)))
    return slots.reshape(-1, tile, num_slots).swapaxes(1, 2)


def _check_dtype(name, array):
    if array.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{name}: got dtype {array.dtype}; allowed: float32, bfloat16")
