"""Dispatch: tokens to expert rows, the experts' work, and back. Needs jax and numpy only."""

from moe_jax.dispatch.capacity import PRIORITIES, capacity, positions
from moe_jax.dispatch.moe import IMPLEMENTATIONS, moe

__all__ = ["IMPLEMENTATIONS", "PRIORITIES", "capacity", "moe", "positions"]
