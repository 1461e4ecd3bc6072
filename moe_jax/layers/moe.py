"""The mixture-of-experts layer.

Axes: T tokens, d width, E experts, k choices, K slots, f expert width.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax import dispatch
from moe_jax.dispatch.capacity import Priority
from moe_jax.dispatch.feed_forward import Activation
from moe_jax.dispatch.moe import Implementation
from moe_jax.layers.experts import Experts
from moe_jax.layers.mlp import Mlp
from moe_jax.layers.router import Router
from moe_jax.routing import TokenChoice


class RoutingInfo(NamedTuple):
    """What a mixture-of-experts layer did with its tokens.

    Attributes:
      routing: the router's choice for all T tokens, before anything is dropped.
      dropped: i32[E], assignments that each expert dropped for want of capacity.
    """

    routing: TokenChoice
    dropped: jax.Array


class MoE(nn.Module):
    """Each token's gated sum of the outputs of its experts, plus the shared experts.

    Attributes:
      num_experts: E.
      expert_width: f.
      route: called as route(logits f32[T, E], valid=bool[T] or None), returns a TokenChoice.
      k: choices per token, which only the capacity uses; at most the K of ``route``.
      activation, glu, use_bias: of the experts, shared or not.
      num_shared_experts: every token also passes through one Mlp of this many times the expert
        width (DeepSeekMoE, Dai et al., 2024, arXiv:2401.06066, section 3.2).
      implementation, priority: as ``moe_jax.dispatch.moe`` takes them.
      capacity_factor: the capacity is ``moe_jax.dispatch.capacity`` of this factor and T. The scope
        is the batch: T is every token of the call, invalid ones too, though they take no room.
        None: nobody is dropped.
      dropout: rate on the output.
      dtype: compute dtype of the experts. The router is float32, so are the parameters.
    """

    num_experts: int
    expert_width: int
    route: Callable[..., TokenChoice]
    k: int
    activation: Activation = "gelu"
    glu: bool = False
    use_bias: bool = False
    num_shared_experts: int = 0
    implementation: Implementation = "dropless"
    capacity_factor: float | None = None
    priority: Priority = "arrival"
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, *, valid: jax.Array | None = None, deterministic: bool = True
    ) -> tuple[jax.Array, RoutingInfo]:
        """Routes every position as one token; the leading axes of x together are T.

        Args:
          x: [..., d].
          valid: bool [...]; invalid tokens are not routed and their output is exactly 0.
          deterministic: no dropout.

        Returns:
          [..., d] in ``dtype``, and the RoutingInfo, whose T follows x in row-major order.

        Raises:
          ValueError: k is not in 1..K, num_shared_experts is negative, or a field has a value that
            ``route``, ``dispatch.capacity`` or ``dispatch.moe`` refuses.
        """
        tokens = x.reshape(-1, x.shape[-1])
        logits = Router(self.num_experts, name="router")(tokens)
        routing = self.route(logits, valid=None if valid is None else valid.reshape(-1))
        self._check(num_slots=routing.expert.shape[-1])
        experts = Experts(
            self.num_experts, self.expert_width, self.glu, self.use_bias, self.dtype, name="experts"
        )
        y, dropped = dispatch.moe(
            tokens.astype(self.dtype),
            routing,
            experts(x.shape[-1]),
            implementation=self.implementation,
            capacity=self._capacity(tokens.shape[0]),
            priority=self.priority,
            activation=self.activation,
        )
        y = y.reshape(x.shape)
        if self.num_shared_experts:
            width = self.num_shared_experts * self.expert_width
            style = dict(activation=self.activation, glu=self.glu, use_bias=self.use_bias)
            shared, _ = Mlp(width, **style, dtype=self.dtype, name="shared")(x)
            y = y + shared
        y = nn.Dropout(self.dropout)(y, deterministic=deterministic)
        if valid is not None:
            y = jnp.where(valid[..., None], y, 0)
        return y, RoutingInfo(routing, dropped)

    def _capacity(self, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return dispatch.capacity(num_tokens, self.num_experts, self.k, self.capacity_factor)

    def _check(self, num_slots: int):
        if not 1 <= self.k <= num_slots:
            raise ValueError(f"MoE.k: got {self.k}; allowed: 1..{num_slots} (slots of the route)")
        if self.num_shared_experts < 0:
            raise ValueError(
                f"MoE.num_shared_experts: got {self.num_shared_experts}; allowed: 0 or more"
            )
