"""Grouped matrix products."""

from moe_jax.kernels.xla_cpu import grouped_matmul

__all__ = ["grouped_matmul"]
