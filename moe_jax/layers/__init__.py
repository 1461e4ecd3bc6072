"""Flax Linen layers: thin, and explicit about what they return."""

from moe_jax.layers.attention import CausalSelfAttention
from moe_jax.layers.experts import Experts
from moe_jax.layers.mlp import Mlp
from moe_jax.layers.moe import MoE, RoutingInfo
from moe_jax.layers.rotary import rotate
from moe_jax.layers.router import Router

__all__ = ["CausalSelfAttention", "Experts", "Mlp", "MoE", "Router", "RoutingInfo", "rotate"]
