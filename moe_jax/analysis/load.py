"""What chance alone makes of the load. Axis legend: T tokens, E experts, C capacity."""

import numpy as np
import scipy.stats

from moe_jax.dispatch import capacity


def expected_drop_fraction(num_tokens: int, num_experts: int, factor: float) -> float:
    """Expected share of tokens dropped by a uniform top-1 router: E * E[(X - C)_+] / T.

    The load X of an expert is binomial, Bin(T, 1/E), and C = ``dispatch.capacity``.

    Args:
      num_tokens: T >= 1.
      num_experts: E >= 1.
      factor: capacity factor > 0.

    Raises:
      ValueError: an argument out of range.
    """
    limit = capacity(num_tokens, num_experts, 1, factor)
    over = np.arange(limit + 1, num_tokens + 1)
    chance = scipy.stats.binom.pmf(over, num_tokens, 1.0 / num_experts)
    return float(num_experts * np.sum((over - limit) * chance) / num_tokens)
