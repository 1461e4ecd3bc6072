"""Routers and their losses as pure functions of router logits. Needs jax and numpy only."""

from moe_jax.routing.assignment import base_assignment, sinkhorn, sinkhorn_plan
from moe_jax.routing.expert_choice import expert_choice
from moe_jax.routing.hashing import hash_route
from moe_jax.routing.logits import cosine_logits, linear_logits
from moe_jax.routing.losses import (
    adapt_l1_weight,
    balance_bias,
    boundary_loss,
    entropy_loss,
    importance_loss,
    load_balance_loss,
    load_loss,
    relu_l1_loss,
    z_loss,
)
from moe_jax.routing.perturb import expert_dropout, input_jitter, noisy_logits, smooth_load
from moe_jax.routing.registry import ROUTERS, default_arguments, make_router
from moe_jax.routing.relu import relu_gate
from moe_jax.routing.router import (
    CommonLosses,
    LogitsRouter,
    Observed,
    Routed,
    Router,
    RouterInputs,
    Weight,
)
from moe_jax.routing.sigmoid import sigmoid_top_k
from moe_jax.routing.smooth import annealed_target, smooth_top_k
from moe_jax.routing.soft import merge_weights, soft_moe_weights
from moe_jax.routing.statistics import (
    LoadStatistics,
    RoutingStatistics,
    load_statistics,
    routing_statistics,
)
from moe_jax.routing.temperature import power_iteration, scheduled_temperature
from moe_jax.routing.token_choice import softmax_top_k, top_k_softmax
from moe_jax.routing.top_p import top_p
from moe_jax.routing.types import (
    Choice,
    ConstantGateWarning,
    ExpertChoice,
    ExpertMerge,
    SoftChoice,
    TokenChoice,
    dense_gates,
    expert_counts,
)

__all__ = [
    "ROUTERS",
    "Choice",
    "CommonLosses",
    "ConstantGateWarning",
    "ExpertChoice",
    "ExpertMerge",
    "LoadStatistics",
    "LogitsRouter",
    "Observed",
    "Routed",
    "Router",
    "RouterInputs",
    "RoutingStatistics",
    "SoftChoice",
    "TokenChoice",
    "Weight",
    "adapt_l1_weight",
    "annealed_target",
    "balance_bias",
    "base_assignment",
    "boundary_loss",
    "cosine_logits",
    "default_arguments",
    "dense_gates",
    "entropy_loss",
    "expert_choice",
    "expert_counts",
    "expert_dropout",
    "hash_route",
    "importance_loss",
    "input_jitter",
    "linear_logits",
    "load_balance_loss",
    "load_loss",
    "load_statistics",
    "make_router",
    "merge_weights",
    "noisy_logits",
    "power_iteration",
    "relu_gate",
    "relu_l1_loss",
    "routing_statistics",
    "scheduled_temperature",
    "sigmoid_top_k",
    "sinkhorn",
    "sinkhorn_plan",
    "smooth_load",
    "smooth_top_k",
    "soft_moe_weights",
    "softmax_top_k",
    "top_k_softmax",
    "top_p",
    "z_loss",
]
