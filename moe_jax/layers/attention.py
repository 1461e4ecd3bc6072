"""Causal self-attention. Axes: B batch, S sequence, d width, H heads, D = d/H head size."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax.layers.rotary import rotate


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions and no biases.

    Vaswani et al. (2017, arXiv:1706.03762), section 3.2, with the positions of ``rotary.rotate``.

    Attributes:
      num_heads: H; d must be a multiple of it and d/H even.
      dropout: rate on the output.
      dtype: compute dtype; parameters, rotation and softmax are float32.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, *, valid: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Attends from every position to itself and the valid positions before it.

        Args:
          x: [B, S, d].
          valid: bool [B, S]; None means all. Nothing attends to an invalid position, so padding on
            either side leaves the outputs at valid positions as they are without it.
          deterministic: no dropout.

        Returns:
          [B, S, d] in ``dtype``; invalid positions are exactly 0.

        Raises:
          ValueError: d is not a multiple of num_heads, or d/num_heads is odd.
        """
        batch, length, width = x.shape
        if self.num_heads < 1 or width % self.num_heads or (width // self.num_heads) % 2:
            raise ValueError(
                f"CausalSelfAttention.num_heads: got {self.num_heads} for width {width}; "
                "allowed: a divisor of the width that leaves an even head size"
            )

        # As a matrix of rows: on CPU XLA takes longer over the gradient of [B, S, d].
        rows = x.reshape(-1, width)

        def project(name: str) -> jax.Array:
            y = nn.Dense(width, use_bias=False, dtype=self.dtype, name=name)(rows)
            return y.reshape(batch, length, self.num_heads, width // self.num_heads)

        positions = jnp.arange(length)
        query, key = rotate(project("query"), positions), rotate(project("key"), positions)
        mask = None if valid is None else valid[:, None, None, :]
        y = jax.nn.dot_product_attention(query, key, project("value"), mask=mask, is_causal=True)
        y = y.reshape(-1, width)
        y = nn.Dense(width, use_bias=False, dtype=self.dtype, name="out")(y).reshape(x.shape)
        y = nn.Dropout(self.dropout)(y, deterministic=deterministic)
        if valid is None:
            return y
        # A query with no valid key gets a uniform average of all values: finite, but meaningless.
        return jnp.where(valid[..., None], y, 0)
