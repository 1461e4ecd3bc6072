"""Routers and their losses as pure functions of router logits. Needs jax and numpy only."""

from moe_jax.routing.losses import load_balance_loss, z_loss
from moe_jax.routing.registry import ROUTERS, default_arguments, make_router
from moe_jax.routing.statistics import (
    LoadStatistics,
    RoutingStatistics,
    load_statistics,
    routing_statistics,
)
from moe_jax.routing.token_choice import softmax_top_k, top_k_softmax
from moe_jax.routing.types import TokenChoice, expert_counts

__all__ = [
    "ROUTERS",
    "LoadStatistics",
    "RoutingStatistics",
    "TokenChoice",
    "default_arguments",
    "expert_counts",
    "load_balance_loss",
    "load_statistics",
    "make_router",
    "routing_statistics",
    "softmax_top_k",
    "top_k_softmax",
    "z_loss",
]
