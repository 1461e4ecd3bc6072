"""Rotary position embedding. Axes: B batch, S sequence, H heads, D head size."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, *, base: float = 10000.0) -> jax.Array:
    """Rotates pairs of features by angles proportional to the position.

    RoFormer (Su et al., 2021, arXiv:2104.09864), equation 34: pair i of D/2 turns by
    position * base^(-2i/D), so a dot product of two rotated vectors depends on their positions only
    through the difference. Pair i is features (i, i + D/2), the layout of GPT-NeoX and Llama; it
    differs from the paper's (2i, 2i + 1) by a fixed permutation of the features.

    Args:
      x: [B, S, H, D], D even.
      positions: integer [S] or [B, S].
      base: the slowest pair turns once in about 2 pi base positions.

    Returns:
      [B, S, H, D] in x's dtype; the angles and the rotation are computed in float32.

    Raises:
      ValueError: D is odd.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"rotate: got head size {size}; allowed: an even head size")
    frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [(B,) S, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
