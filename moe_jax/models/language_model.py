"""A decoder-only language model, dense or mixture of experts.

Axes: B batch, S sequence, d width, V vocabulary, T = B*S tokens, L_moe blocks with experts.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from moe_jax.layers.attention import CausalSelfAttention
from moe_jax.layers.moe import RoutingInfo

_float32_dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)


def _spread(x, batch_axes):
    """x [B, ...] with B over the mesh axes, where they divide it."""
    if not batch_axes:
        return x
    shape = jax.sharding.get_abstract_mesh().shape
    if x.shape[0] % math.prod(shape[axis] for axis in batch_axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes))


class Block(nn.Module):
    """A pre-norm decoder block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Sources: Xiong et al. 2020 (arXiv:2002.04745) for the place of the norm, Zhang & Sennrich 2019
    (arXiv:1910.07467) for RMSNorm.

    Attributes:
      make_feed_forward: makes the feed-forward module.
      num_heads: of the attention.
      dropout: of the attention's output; the feed-forward module brings its own.
      dtype: compute dtype.
    """

    make_feed_forward: Callable[[], nn.Module]
    num_heads: int
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    def setup(self):
        self.attention_norm = nn.RMSNorm(dtype=self.dtype)
        self.attention = CausalSelfAttention(self.num_heads, self.dropout, self.dtype)
        self.feed_forward_norm = nn.RMSNorm(dtype=self.dtype)
        self.feed_forward = self.make_feed_forward()

    def __call__(
        self,
        x: jax.Array,
        valid: jax.Array | None,
        token_ids: jax.Array,
        deterministic: bool,
    ) -> tuple[jax.Array, RoutingInfo | None]:
        """Maps x [B, S, d] to [B, S, d] and the feed-forward module's routing, None if dense."""
        x = x + self.attention(self.attention_norm(x), valid=valid, deterministic=deterministic)
        y, info = self.feed_forward(
            self.feed_forward_norm(x),
            valid=valid,
            token_ids=token_ids,
            deterministic=deterministic,
        )
        return x + y, info


class Blocks(nn.Module):
    """Consecutive blocks, of which every ``moe_every``-th has the experts.

    Attributes:
      num_blocks: how many.
      dense, moe, moe_every, num_heads, dropout, remat, dtype, batch_axes: as in LanguageModel.
      prevent_cse: as in ``jax.checkpoint``; not needed where a scan surrounds the blocks.
    """

    num_blocks: int
    dense: Callable[[], nn.Module]
    moe: Callable[[], nn.Module] | None
    moe_every: int
    num_heads: int
    dropout: float
    remat: bool
    dtype: DTypeLike
    batch_axes: tuple[str, ...] = ()
    prevent_cse: bool = True

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        valid: jax.Array | None,
        token_ids: jax.Array,
        deterministic: bool,
    ) -> tuple[jax.Array, RoutingInfo | None]:
        """Maps x [B, S, d] to [B, S, d] and the routing, stacked over the blocks with experts."""
        block_class = Block
        if self.remat:  # deterministic is argument 4, self included
            block_class = nn.remat(Block, static_argnums=(4,), prevent_cse=self.prevent_cse)
        infos = []
        for i in range(self.num_blocks):
            with_experts = self.moe is not None and (i + 1) % self.moe_every == 0
            block = block_class(
                self.moe if with_experts else self.dense,
                self.num_heads,
                self.dropout,
                self.dtype,
                name=f"block_{i}",
            )
            x, info = block(x, valid, token_ids, deterministic)
            x = _spread(x, self.batch_axes)
            if with_experts:
                infos.append(info)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *infos) if infos else None
        return x, stacked


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head.

    Attributes:
      vocab_size: V.
      width: d.
      num_layers: number of blocks.
      num_heads: attention heads; width / num_heads must be an even number.
      dense: makes a feed-forward module, called as module(x, valid=..., token_ids=...,
        deterministic=...) and returning (y, RoutingInfo or None), such as ``layers.Mlp``.
      moe: makes the feed-forward module of the last block of every ``moe_every``, such as
        ``layers.MoE``; None for a dense model.
      moe_every: 1 puts experts in every block, 2 in the second, fourth and so on.
      tie_embeddings: the head is the embedding transposed, else a matrix of its own.
      dropout: rate after the embedding and on the attention's output; the feed-forward modules
        have their own rate, on their output.
      remat: recompute each block in the backward pass, for memory.
      scan_layers: one compiled group of ``moe_every`` blocks in a ``jax.lax.scan``, for compile
        time. The parameters are stacked, see ``models.scan``; dropout draws other masks.
      dtype: compute dtype; parameters, router and logits are float32.
      batch_axes: mesh axes of ``jax.set_mesh`` that share the batch; what flows from block to block
        is kept spread over them, so that it is weights that are gathered. (): no mesh.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    dense: Callable[[], nn.Module]
    moe: Callable[[], nn.Module] | None = None
    moe_every: int = 1
    tie_embeddings: bool = True
    dropout: float = 0.0
    remat: bool = False
    scan_layers: bool = False
    dtype: DTypeLike = jnp.float32
    batch_axes: tuple[str, ...] = ()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, valid: jax.Array | None = None, deterministic: bool = True
    ) -> tuple[jax.Array, RoutingInfo | None]:
        """Next-token logits at every position.

        Args:
          tokens: int[B, S], each in 0..V-1 (another one gives NaN).
          valid: bool[B, S], False at padding, which no other position sees; its logits mean
            nothing. None: all are valid.
          deterministic: no dropout and no randomness of routing; otherwise the RNG collections
            "dropout" and "router" are needed.

        Returns:
          Logits f32[B, S, V] and the RoutingInfo with a leading axis L_moe in the order of the
          blocks, None for a dense model.

        Raises:
          ValueError: tokens not int[B, S], valid of another shape, num_layers or moe_every out of
            range, heads that do not fit the width.
        """
        self._check(tokens, valid)
        # Its initial variance 1/d gives the tied head logits of variance 1, as an untied one has.
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype, name="tokens")
        x = nn.Dropout(self.dropout)(embed(tokens), deterministic=deterministic)
        x = _spread(x, self.batch_axes)
        x, info = self._apply_blocks(x, valid, tokens, deterministic)
        x = nn.RMSNorm(dtype=self.dtype, name="final_norm")(x)
        if self.tie_embeddings:
            kernel = embed.embedding.astype(self.dtype)
            return jnp.einsum("bsd,vd->bsv", x, kernel, preferred_element_type=jnp.float32), info
        head = nn.Dense(
            self.vocab_size,
            use_bias=False,
            dtype=self.dtype,
            dot_general=_float32_dot,
            name="head",
        )
        return head(x), info

    def _apply_blocks(self, x, valid, tokens, deterministic):
        fields = dict(
            dense=self.dense,
            moe=self.moe,
            moe_every=self.moe_every,
            num_heads=self.num_heads,
            dropout=self.dropout,
            remat=self.remat,
            dtype=self.dtype,
            batch_axes=self.batch_axes,
        )
        if not self.scan_layers:
            blocks = Blocks(self.num_layers, **fields, name="blocks")
            return blocks(x, valid, tokens, deterministic)
        group_size = 1 if self.moe is None else self.moe_every
        scanned = nn.scan(
            Blocks,
            variable_axes={"params": 0, "router_state": 0, "replay": 0},
            split_rngs={"params": True, "dropout": True, "router": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
            length=self.num_layers // group_size,
        )
        groups = scanned(group_size, **fields, prevent_cse=False, name="scanned_blocks")
        x, info = groups(x, valid, tokens, deterministic)
        # Each group has stacked its single RoutingInfo, and the scan has stacked those.
        return x, jax.tree.map(lambda leaf: leaf[:, 0], info)

    def _check(self, tokens, valid):
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: got {tokens.dtype}{tokens.shape}; allowed: int[B, S]")
        if valid is not None and valid.shape != tokens.shape:
            raise ValueError(f"valid: got shape {valid.shape}; allowed: {tokens.shape}, as tokens")
        if self.num_layers < 1:
            raise ValueError(f"LanguageModel.num_layers: got {self.num_layers}; allowed: 1 or more")
        if self.moe is None:
            return
        if not 1 <= self.moe_every <= self.num_layers:
            raise ValueError(
                f"LanguageModel.moe_every: got {self.moe_every}; allowed: 1..{self.num_layers}"
                " (num_layers)"
            )
        if self.scan_layers and self.num_layers % self.moe_every:
            raise ValueError(
                f"LanguageModel.num_layers: got {self.num_layers}; allowed with scan_layers:"
                f" multiples of {self.moe_every} (moe_every)"
            )
