"""Softmax, top-k, position in expert and counts on TPU, in one pass over the router logits.

A tile of logits lies with its experts along the sublanes and its tokens along the lanes, so that
reductions over experts are cheap, 8 experts fill a register and the results, k numbers per token,
are stored without padding. The largest logit is found and masked away k times. How many tokens of
the tile before a token chose its expert is a product of the 0/1 matrix of choices with a triangular
one, exact in bfloat16 with float32 sums; the counts of the tiles before are added as int32.

Axis legend: T tokens, E experts, k choices; t tokens per tile, e experts filled up.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_jax.kernels.backend import check_route
from moe_jax.kernels.manual import result_type

_LANES, _SUBLANES = 128, 8
# A product of 0/1 matrices takes the more work per token the larger the tile.
_LARGEST_TILE = 256


def route(logits, k, valid, *, interpret=False):
    """Routes every valid token to the experts of its k largest logits.

    Args:
      logits: f32[T, E], E <= 256. A NaN is chosen last and leaves its slot empty, and makes the
        probabilities of its token NaN.
      k: 1 <= k <= min(E, 8).
      valid: bool[T].
      interpret: as in ``pallas_call``.

    Returns:
      expert i32[T, k]: by falling logit, equal ones by lowest index; E for an invalid token or a
        logit of -inf.
      probability f32[T, k]: softmax over all E logits, of the expert; 0 in empty slots.
      position i32[T, k]: how many earlier assignments (token by token, a token's choices in order)
        name the same expert; T*k in empty slots.
      counts i32[E]: assignments per expert.

    Raises:
      ValueError: too many experts, choices or assignments.
    """
    num_tokens, num_experts = logits.shape
    check_route(num_tokens, num_experts, k)
    if not num_tokens:
        empty = jnp.zeros((0, k), jnp.int32)
        return empty, empty.astype(jnp.float32), empty, jnp.zeros(num_experts, jnp.int32)
    tile = min(_LARGEST_TILE, pl.cdiv(num_tokens, _LANES) * _LANES)
    # -inf stands for all that cannot be chosen: an invalid token, a token or an expert that is not.
    logits = jnp.where(valid[:, None], logits, -jnp.inf).astype(jnp.float32).T
    filling = (0, -num_experts % _SUBLANES), (0, -num_tokens % tile)
    logits = jnp.pad(logits, filling, constant_values=-jnp.inf)
    rows, columns = logits.shape
    per_choice = pl.BlockSpec((k, tile), lambda i: (0, i))
    call = pl.pallas_call(
        functools.partial(_kernel, num_experts=num_experts, empty_position=num_tokens * k),
        (
            result_type((k, columns), jnp.int32, logits),
            result_type((k, columns), jnp.float32, logits),
            result_type((k, columns), jnp.int32, logits),
            result_type((rows, 1), jnp.int32, logits),
        ),
        grid=(columns // tile,),
        in_specs=[pl.BlockSpec((rows, tile), lambda i: (0, i))],
        # All tiles have the same block of counts: it stays where it is and carries the sums.
        out_specs=(per_choice, per_choice, per_choice, pl.BlockSpec((rows, 1), lambda i: (0, 0))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )
    *choices, counts = call(logits)
    return *(choice[:, :num_tokens].T for choice in choices), counts[:num_experts, 0]


def _kernel(logits, expert, probability, position, counts, *, num_experts, empty_position):
    @pl.when(pl.program_id(0) == 0)
    def _():
        counts[...] = jnp.zeros_like(counts)

    scores = logits[...]
    unnormalized = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
    # NaN for a token without any choice; it is masked below.
    probabilities = unnormalized / jnp.sum(unnormalized, axis=0, keepdims=True)

    chosen_by = _top_k(scores, expert, num_experts)
    before, total = _count(sum(chosen.astype(jnp.float32) for chosen in chosen_by))
    before += counts[...]
    counts[...] += total
    for j, chosen in enumerate(chosen_by):
        used = expert[j : j + 1] < num_experts
        probability[j : j + 1] = _pick(probabilities, chosen)
        position[j : j + 1] = jnp.where(used, _pick(before, chosen), empty_position)


def _top_k(scores, expert, num_experts):
    """Writes the experts by falling score; returns for each choice bool[e, t], where it is."""
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    left = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    chosen_by = []
    for j in range(expert.shape[0]):
        best = jnp.max(left, axis=0, keepdims=True)
        best_index = jnp.min(jnp.where(left == best, index, index.shape[0]), axis=0, keepdims=True)
        expert[j : j + 1] = jnp.where(best > -jnp.inf, best_index, num_experts)
        chosen = (index == best_index) & (best > -jnp.inf)
        left = jnp.where(chosen, -jnp.inf, left)
        chosen_by.append(chosen)
    return chosen_by


def _count(assigned):
    """For 0/1 float32 [e, t]: how many stand before each token, and in all, as int32."""
    tile = assigned.shape[1]
    token = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 0)
    later = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 1)
    before = jax.lax.dot(
        assigned.astype(jnp.bfloat16),
        (token < later).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    total = jnp.sum(assigned, axis=1, keepdims=True)
    return before.astype(jnp.int32), total.astype(jnp.int32)


def _pick(values, chosen):
    """The one value per token at the chosen expert, 0 if there is none."""
    return jnp.sum(jnp.where(chosen, values, 0), axis=0, keepdims=True)
