"""Dispatch: tokens to expert rows, the experts' work, and back. Needs jax and numpy only."""

from moe_jax.dispatch.capacity import PRIORITIES, capacity, positions
from moe_jax.dispatch.exchange import EXCHANGES
from moe_jax.dispatch.expert_parallel import CAPACITY_SCOPES, ExpertParallel
from moe_jax.dispatch.moe import IMPLEMENTATIONS, moe

__all__ = [
    "CAPACITY_SCOPES",
    "EXCHANGES",
    "IMPLEMENTATIONS",
    "PRIORITIES",
    "ExpertParallel",
    "capacity",
    "moe",
    "positions",
]
