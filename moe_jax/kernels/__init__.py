"""Grouped matrix products, moves of rows and fused routing, by the best backend for the device."""

from moe_jax.kernels.api import BACKENDS, explain, grouped_matmul, select
from moe_jax.kernels.router import fused_router

__all__ = ["BACKENDS", "explain", "fused_router", "grouped_matmul", "select"]
