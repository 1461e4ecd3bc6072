"""Routing by a fixed hash of the token, without anything learned.

Axis legend: T tokens, E experts, k choices.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.routing.router import CommonLosses, Router
from moe_jax.routing.token_choice import router_probs, select
from moe_jax.routing.types import TokenChoice, check_count, check_valid


def hash_route(
    token_ids: jax.Array,
    num_experts: int,
    k: int = 1,
    *,
    salt: jax.Array | None = None,
    valid: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> TokenChoice:
    """k distinct experts that follow from the token alone, each with gate 1/k.

    Every pair of token and expert has a hash, and a token takes the k experts of its highest
    hashes, so that all sets are equally likely. Source: Roller et al. 2021 (arXiv:2106.04426), the
    random hash.

    Args:
      token_ids: int[T], of the vocabulary.
      num_experts: E.
      k: choices per token, 1 <= k <= E.
      salt: u32[E]; another salt is another hash. None: 0, 1, 2, ...
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      chosen: i32[T, K], experts to take instead (E: empty slot).

    Returns:
      TokenChoice with K = k; logits are 0, so probs are uniform.

    Raises:
      ValueError: token_ids not int[T], k out of range.
    """
    token_ids = jnp.asarray(token_ids)
    if token_ids.ndim != 1 or not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise ValueError(f"token_ids: got {token_ids.dtype}{token_ids.shape}; allowed: int[T]")
    k = check_count("k", k, num_experts, "the number of experts")
    valid = check_valid(valid, token_ids.shape[0])
    salt = jnp.arange(num_experts, dtype=jnp.uint32) if salt is None else salt
    mixed = _mix(_mix(token_ids.astype(jnp.uint32))[:, None] ^ _mix(salt))
    # To float32 with 24 bits: exact, and ties are as rare as they can be.
    scores = (mixed >> 8).astype(jnp.float32)
    expert, used = select(scores, k, valid, chosen)
    count = jnp.maximum(jnp.sum(used, axis=-1, keepdims=True), 1)
    logits = jnp.zeros(scores.shape, jnp.float32)
    return TokenChoice(
        expert, jnp.where(used, 1.0 / count, 0.0), logits, router_probs(logits, valid)
    )


def _mix(bits):
    """The final step of MurmurHash3: every input bit reaches every output bit."""
    bits = bits ^ (bits >> 16)
    bits = bits * np.uint32(0x85EBCA6B)
    bits = bits ^ (bits >> 13)
    bits = bits * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashRoute(Router):
    """``hash_route``, with a hash of its own in every layer."""

    needs_token_ids: ClassVar[bool] = True
    can_leave_out_experts: ClassVar[bool] = False  # there are no logits to mask
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=None, z=None)

    def weights(self, width, num_experts):
        return {}

    def state(self, key, weights, num_experts):
        return {"salt": jax.random.bits(key, (num_experts,), jnp.uint32)}

    def logits(self, inputs, weights, state):
        if inputs.token_ids is None:
            raise ValueError("token_ids: got None; the router hash needs the ids of the tokens")
        if inputs.expert_mask is not None:
            raise ValueError("expert_mask: got a mask; the router hash has no logits to mask")
        return jnp.zeros((inputs.x.shape[0], state["salt"].shape[0]), jnp.float32)

    def choose(self, logits, inputs, weights, state):
        return hash_route(
            inputs.token_ids,
            logits.shape[1],
            self.k,
            salt=state["salt"],
            valid=inputs.valid,
            chosen=inputs.chosen,
        )
