"""From tokens to router logits, in float32 whatever the dtype of the tokens.

Only x may have been rounded: a bfloat16 product with a cast after it would choose other experts
for some tokens. Source: selective precision, Switch Transformer, section 2.4.

Axis legend: T tokens, d width, E experts, p width of a projection.
"""

import jax
import jax.numpy as jnp


def linear_logits(x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w: f32[..., E] from x float[..., d] and w f32[d, E].

    Raises:
      ValueError: shapes that do not fit.
    """
    return _matmul(jnp.asarray(x, jnp.float32), w)


def cosine_logits(
    x: jax.Array, projection: jax.Array, expert_embedding: jax.Array, scale: jax.Array | float
) -> jax.Array:
    """scale * cos(x @ projection, expert): logits that no norm can blow up.

    Source: Chi et al. 2022 (arXiv:2204.09179); the router of GMoE (Li et al. 2023).

    Args:
      x: float[T, d]. A token that the projection maps to 0 has logits 0, with zero gradient.
      projection: f32[d, p].
      expert_embedding: f32[p, E], a column per expert.
      scale: f32[], the largest logit there can be, 1 / temperature.

    Returns:
      f32[T, E], in [-scale, scale].

    Raises:
      ValueError: shapes that do not fit.
    """
    projected = unit(_matmul(jnp.asarray(x, jnp.float32), projection), axis=-1)
    return scale * _matmul(projected, unit(jnp.asarray(expert_embedding, jnp.float32), axis=0))


def _matmul(x, w):
    w = jnp.asarray(w)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x, w: got shapes {x.shape}, {w.shape}; allowed: [..., d], [d, E]")
    return jnp.matmul(x, w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def unit(v: jax.Array, axis: int) -> jax.Array:
    """v over its norm; 0 where the norm is 0, with zero gradient (the gradient of |v| is NaN)."""
    # Divided by the largest entry first, whose square could be 0 or infinite.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(v), axis=axis, keepdims=True))
    v = v / jnp.where(largest == 0, 1.0, largest)
    square = jnp.sum(v * v, axis=axis, keepdims=True)
    zero = square == 0
    return jnp.where(zero, 0.0, v) * jax.lax.rsqrt(jnp.where(zero, 1.0, square))
