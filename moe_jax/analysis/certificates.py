"""How far a token may move before its experts change.

Everything is jnp, so it runs inside jit, vmap and grad.

Axis legend: d width, E experts, k choices.
"""

import jax
import jax.numpy as jnp

from moe_jax.routing import linear_logits
from moe_jax.routing.types import check_count


def gate_lipschitz(w: jax.Array, temperature: jax.Array | float = 1.0) -> jax.Array:
    """Lipschitz constant of x -> softmax(x w / temperature): |w|_2 / (2 temperature).

    The Jacobian of the softmax has a norm of at most 1/2, attained at (1/2, 1/2, 0, ...).

    Args:
      w: float[d, E].
      temperature: > 0.

    Returns:
      f32[].
    """
    return jnp.linalg.norm(jnp.asarray(w, jnp.float32), ord=2) / (2.0 * temperature)


def certified_radius(x: jax.Array, w: jax.Array, temperature: jax.Array | float = 1.0) -> jax.Array:
    """Within this distance of x the best expert stays the best: sqrt(2) tau m(x) / |w|_2.

    m is the gap between the two largest values of softmax(x w / tau). It follows from the constant
    of the gate alone, so it never exceeds the exact radius and depends on the temperature, on
    which the choice does not. Source: temperature-controlled gating.

    Args:
      x: float[..., d].
      w: float[d, E], E >= 2.
      temperature: tau > 0.

    Returns:
      f32[...].
    """
    gates = jax.nn.softmax(linear_logits(x, w) / temperature)
    best = jax.lax.top_k(gates, 2)[0]
    norm = jnp.linalg.norm(jnp.asarray(w, jnp.float32), ord=2)
    return jnp.sqrt(2.0) * temperature * (best[..., 0] - best[..., 1]) / norm


def exact_radius(x: jax.Array, w: jax.Array, k: int, b: jax.Array | None = None) -> jax.Array:
    """Distance from x to the nearest token with another set of k best experts.

    min over i in the set and j outside of (z_i - z_j) / |w_i - w_j|, with z = x w + b: the distance
    to the nearest of the hyperplanes on which two of them tie.

    Args:
      x: float[..., d].
      w: float[d, E].
      k: choices, 1 <= k <= E.
      b: float[E], a selection bias. None: none.

    Returns:
      f32[...]; infinite for k = E, and 0 at a tie.

    Raises:
      ValueError: k out of range.
    """
    w = jnp.asarray(w, jnp.float32)
    num_experts = w.shape[1]
    k = check_count("k", k, num_experts, "the number of experts")
    z = linear_logits(x, w)
    z = z if b is None else z + b
    chosen = jax.nn.one_hot(jax.lax.top_k(z, k)[1], num_experts, dtype=bool).any(axis=-2)
    gap = z[..., :, None] - z[..., None, :]
    # From the differences: |a|^2 + |b|^2 - 2 a.b would cancel for experts that are close.
    distance = jnp.linalg.norm(w[:, :, None] - w[:, None, :], axis=0)
    # Experts of equal weights change places nowhere, or are tied everywhere.
    radius = jnp.where(distance > 0, gap / jnp.where(distance > 0, distance, 1.0), jnp.inf)
    radius = jnp.where((distance == 0) & (gap == 0), 0.0, radius)
    across = chosen[..., :, None] & ~chosen[..., None, :]
    return jnp.min(jnp.where(across, radius, jnp.inf), axis=(-2, -1))
