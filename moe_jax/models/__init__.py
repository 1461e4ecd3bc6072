"""Models: dense or mixture of experts, by the feed-forward modules handed in."""

from moe_jax.models.accounting import (
    ForwardFlops,
    ParameterCount,
    count_parameters,
    forward_flops_per_token,
)
from moe_jax.models.language_model import Block, Blocks, LanguageModel
from moe_jax.models.routers import (
    changed_sets,
    load_choice,
    record_choice,
    replay_choice,
    save_choice,
    stack_routers,
    unstack_routers,
)
from moe_jax.models.scan import stack_layers, unstack_layers

__all__ = [
    "Block",
    "Blocks",
    "ForwardFlops",
    "LanguageModel",
    "ParameterCount",
    "changed_sets",
    "count_parameters",
    "forward_flops_per_token",
    "load_choice",
    "record_choice",
    "replay_choice",
    "save_choice",
    "stack_layers",
    "stack_routers",
    "unstack_layers",
    "unstack_routers",
]
