"""Routing on NVIDIA Hopper: softmax, top-k, position in expert and counts.

One kernel, a warpgroup per tile of 64 tokens: the tile's logits stay in registers while the k
largest of each row are taken out one after the other. The experts of the tile then meet each
other in shared memory: comparing all with all gives how many tokens before this one, in the tile,
chose the same expert, and comparing them with the names of the experts gives the tile's counts.
A token chooses an expert only once, so what comes earlier within the token does not matter. A
sum over the counts of the tiles before, in XLA, makes positions of it. Nothing is atomic and no
order depends on timing: every run gives the same bits.

Tokens are padded to a multiple of 64 and experts to a multiple of 8, if need be, which copies the
logits.

Axis legend: see ``moe_jax.kernels.backend``; in the kernel and its results the choices come first,
[k, T], and a square [64, 64] compares the tokens of a tile with each other or with 64 experts.
"""

import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.backend import check_route
from moe_jax.kernels.mosaic_gpu import compat

_TILE = 64

# A tile, 16 rows per warp, and what is left of it when one axis is summed away: the vectors that
# run down and along it.
_MATRIX = plgpu.Layout.WGMMA
_DOWN = _MATRIX.reduce(1)
_ALONG = _MATRIX.reduce(0)


def route(
    logits: jax.Array, k: int, valid: jax.Array, *, interpret=False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Routes every valid token to the experts of its k largest logits.

    Args:
      logits: f32[T, E], E <= 256.  k: 1 <= k <= min(E, 8).  valid: bool[T].
      interpret: as in ``compat.interpreter``.

    Returns:
      expert i32[T, k], probability f32[T, k], position i32[T, k] and counts i32[E], as in
      ``moe_jax.kernels.backend.Route``.

    Raises:
      ValueError: E, k or T * k out of range.
    """
    num_tokens, num_experts = logits.shape
    check_route(num_tokens, num_experts, k)
    if not num_tokens:
        empty = jnp.zeros((0, k), jnp.int32)
        return empty, empty.astype(jnp.float32), empty, jnp.zeros(num_experts, jnp.int32)
    pad_tokens = -num_tokens % _TILE
    pad_experts = -num_experts % 8
    padded = jnp.pad(logits, ((0, pad_tokens), (0, pad_experts)), constant_values=-jnp.inf)
    valid = jnp.pad(valid, (0, pad_tokens)).astype(jnp.int32)
    *slots, counts = _route_tiles(padded, k, valid, num_experts, interpret)
    expert, probability, rank = (slot.T[:num_tokens] for slot in slots)
    counts = counts[:, :num_experts]
    before = jnp.cumsum(counts, axis=0) - counts
    tile = jnp.arange(num_tokens)[:, None] // _TILE
    position = before[tile, jnp.minimum(expert, num_experts - 1)] + rank
    position = jnp.where(expert < num_experts, position, num_tokens * k)
    return expert, probability, position, jnp.sum(counts, axis=0)


def _route_tiles(logits, k, valid, num_experts, interpret):
    """Expert, probability and rank within the tile, [k, T] each, and the counts of each tile."""
    num_tokens = logits.shape[0]
    num_tiles = num_tokens // _TILE
    counted = pl.cdiv(num_experts, _TILE) * _TILE

    def route_tile(
        logits_ref, valid_ref, expert_ref, probability_ref, rank_ref, counts_ref, chosen_ref
    ):
        tile = lax.axis_index("tile")
        tokens = pl.ds(tile * _TILE, _TILE)
        tile_logits = _load(logits_ref.at[tokens], _MATRIX)
        is_valid = _load(valid_ref.at[tokens], _DOWN) > 0

        def write(j, expert, probability):
            chosen_ref[j] = expert
            expert_ref[j, tokens] = expert
            probability_ref[j, tokens] = probability

        _choose(tile_logits, is_valid, k, num_experts, write)
        for first in range(0, counted, _TILE):
            counts_ref[tile, pl.ds(first, _TILE)] = _count(chosen_ref, first)

        def rank(j, carry):
            rank_ref[j, tokens] = _rank(chosen_ref, j)
            return carry

        lax.fori_loop(0, k, rank, None)

    slots = jax.ShapeDtypeStruct((k, num_tokens), jnp.int32)
    probability = jax.ShapeDtypeStruct((k, num_tokens), jnp.float32)
    counts = jax.ShapeDtypeStruct((num_tiles, counted), jnp.int32)
    return plgpu.kernel(
        route_tile,
        out_type=(slots, probability, slots, counts),
        scratch_types=(plgpu.SMEM((k, _TILE), jnp.int32),),
        grid=(num_tiles,),
        grid_names=("tile",),
        # All layouts are written down here; inferring them takes minutes for some shapes.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=compat.interpreter(interpret),
    )(logits, valid)


def _choose(logits, is_valid, k, num_experts, write):
    """Calls write(j, expert, probability), each [64], for the choices j of all tokens."""
    shape = logits.shape
    name = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_MATRIX)
    largest = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp(logits - _spread(largest, shape, 0)), axis=1)

    def choose(j, left):
        best = jnp.max(left, axis=1)
        # The lowest index of the equal ones.
        index = jnp.min(jnp.where(left == _spread(best, shape, 0), name, num_experts), axis=1)
        used = is_valid & (best > -jnp.inf)
        expert = jnp.where(used, index, num_experts)
        write(j, expert, jnp.where(used, jnp.exp(best - largest) / total, 0.0))
        return jnp.where(name == _spread(index, shape, 0), -jnp.inf, left)

    lax.fori_loop(0, k, choose, logits)


def _count(chosen_ref, first):
    """i32[64]: how often the tile chose each of the experts from ``first`` on."""
    name = first + _square_iota(0)

    def add(j, matches):
        chosen = _spread(_load(chosen_ref.at[j], _ALONG), name.shape, 1)
        return matches + jnp.where(chosen == name, 1, 0)

    return jnp.sum(lax.fori_loop(0, chosen_ref.shape[0], add, _no_matches()), axis=1)


def _rank(chosen_ref, j):
    """i32[64]: how many tokens before this one, in the tile, also chose its expert j."""
    is_earlier = _square_iota(1) < _square_iota(0)
    own = _spread(_load(chosen_ref.at[j], _DOWN), is_earlier.shape, 0)

    def add(i, matches):
        other = _spread(_load(chosen_ref.at[i], _ALONG), is_earlier.shape, 1)
        return matches + jnp.where((other == own) & is_earlier, 1, 0)

    return jnp.sum(lax.fori_loop(0, chosen_ref.shape[0], add, _no_matches()), axis=1)


def _square_iota(axis):
    return plgpu.broadcasted_iota(jnp.int32, (_TILE, _TILE), axis, layout=_MATRIX)


def _no_matches():
    return plgpu.layout_cast(jnp.zeros((_TILE, _TILE), jnp.int32), _MATRIX)


def _spread(vector, shape, axis):
    """The vector along ``axis`` of a matrix, the same in all lines."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), _MATRIX)


def _load(ref, layout):
    # jax 0.10.2 asks for an index beside the ref, later releases take none.
    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)
