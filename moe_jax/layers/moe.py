"""The mixture-of-experts layer.

Axes: T tokens, d width, E experts, k choices, K slots, f expert width.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax import dispatch, routing
from moe_jax.dispatch.capacity import Priority
from moe_jax.dispatch.feed_forward import Activation
from moe_jax.dispatch.moe import Implementation
from moe_jax.layers.experts import Experts
from moe_jax.layers.mlp import Mlp
from moe_jax.layers.router import Router
from moe_jax.routing import Choice, TokenChoice


class RoutingInfo(NamedTuple):
    """What a mixture-of-experts layer did with its tokens.

    Attributes:
      routing: the router's choice for all T tokens, before anything is dropped.
      dropped: i32[E], assignments that each expert dropped for want of capacity.
      logits: f32[T, E], the router logits.
      losses: the routing method's own losses by name, f32[] each, weighted.
      report: scalars of the routing method worth watching, by name, f32[] each.
    """

    routing: Choice
    dropped: jax.Array
    logits: jax.Array
    losses: dict[str, jax.Array]
    report: dict[str, jax.Array]


class MoE(nn.Module):
    """Each token's gated sum of the outputs of its experts, plus the shared experts.

    Attributes:
      num_experts: E.
      expert_width: f.
      method: says who goes where, such as ``moe_jax.routing.make_router("softmax_top_k", k=2)``.
      activation, glu, use_bias: of the experts, shared or not.
      num_shared_experts: every token also passes through one Mlp of this many times the expert
        width (DeepSeekMoE, Dai et al., 2024, arXiv:2401.06066, section 3.2).
      implementation, priority, backend: as ``moe_jax.dispatch.moe`` takes them. With "einsum" every
        derivative exists; the others have one, in reverse mode. The router's kernel is chosen for
        the device, whatever the backend of the experts.
      capacity_factor: the capacity is ``moe_jax.dispatch.capacity`` of this factor and T. The scope
        is the batch: T is every token of the call, invalid ones too, though they take no room. With
        ``parallel`` of capacity_scope "shard" it is the tokens of one shard, where tokens choose.
        None: nobody is dropped; where experts choose, 1. Methods without assignments have none.
      parallel: as ``moe_jax.dispatch.moe`` takes it. None: one device, or XLA finds out.
      input_jitter, expert_dropout: of the router, in training, see ``Router``.
      dropout: rate on the output.
      dtype: compute dtype of the experts. The router is float32, so are the parameters.
    """

    num_experts: int
    expert_width: int
    method: routing.Router
    activation: Activation = "gelu"
    glu: bool = False
    use_bias: bool = False
    num_shared_experts: int = 0
    implementation: Implementation = "dropless"
    capacity_factor: float | None = None
    priority: Priority = "arrival"
    backend: str | None = None
    parallel: dispatch.ExpertParallel | None = None
    input_jitter: float = 0.0
    expert_dropout: float = 0.0
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        valid: jax.Array | None = None,
        token_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> tuple[jax.Array, RoutingInfo]:
        """Routes every position as one token; the leading axes of x together are T.

        Args:
          x: [..., d]; the last axis but one is that of a sequence.
          valid: bool [...]; invalid tokens are not routed and their output is exactly 0.
          token_ids: i32 [...], for methods that route by them.
          deterministic: no dropout and no randomness of routing; otherwise the RNG collections
            "router" and, with dropout, "dropout" are needed.

        Returns:
          [..., d] in ``dtype``, and the RoutingInfo, whose T follows x in row-major order.

        Raises:
          ValueError: num_shared_experts is negative, or a field has a value that ``method``,
            ``dispatch.capacity`` or ``dispatch.moe`` refuses.
        """
        self._check()
        if valid is not None:
            # 0 * NaN is NaN: what stands at invalid places must not reach the gradient of a weight.
            x = jnp.where(valid[..., None], x, 0)
        tokens = x.reshape(-1, x.shape[-1])
        routed, position, report = self._route(
            tokens, x.shape[:-1], valid, token_ids, deterministic
        )
        experts = Experts(
            self.num_experts, self.expert_width, self.glu, self.use_bias, self.dtype, name="experts"
        )
        chosen_by_token = self.method.choice_type is TokenChoice
        y, dropped = dispatch.moe(
            tokens.astype(self.dtype),
            routed.choice,
            experts(x.shape[-1]),
            implementation=self.implementation,
            capacity=self._capacity_of_tokens(len(tokens)) if chosen_by_token else None,
            priority=self.priority,
            activation=self.activation,
            position=position if self.priority == "arrival" else None,
            backend=self.backend,
            parallel=self.parallel,
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
        return y, RoutingInfo(routed.choice, dropped, routed.logits, routed.losses, report)

    def _route(self, tokens, shape, valid, token_ids, deterministic):
        router = Router(
            self.method,
            self.num_experts,
            input_jitter=self.input_jitter,
            expert_dropout=self.expert_dropout,
            # Over a mesh, positions are counted where the tokens are.
            fused=self.implementation != "einsum" and self.parallel is None,
            name="router",
        )
        return router(
            tokens,
            valid=None if valid is None else valid.reshape(-1),
            token_ids=None if token_ids is None else token_ids.reshape(-1),
            num_sequences=math.prod(shape[:-1]),
            capacity=self._capacity(len(tokens)),
            deterministic=deterministic,
        )

    def _check(self):
        if not isinstance(self.method, routing.Router):
            raise ValueError(
                f"MoE.method: got {self.method!r}; allowed: a Router, such as"
                ' make_router("softmax_top_k", k=2)'
            )
        if self.num_shared_experts < 0:
            raise ValueError(
                f"MoE.num_shared_experts: got {self.num_shared_experts}; allowed: 0 or more"
            )
        without = (routing.SoftChoice, routing.ExpertMerge)
        if self.capacity_factor is not None and self.method.choice_type in without:
            name = type(self.method).__name__
            raise ValueError(
                f"MoE.capacity_factor: got {self.capacity_factor}; allowed: None with {name}"
            )

    def _capacity_of_tokens(self, num_tokens: int) -> int | None:
        """Of the scope in which tokens compete for an expert."""
        if self.parallel is None or self.parallel.capacity_scope == "batch":
            return self._capacity(num_tokens)
        return self._capacity(-(-num_tokens // self.parallel.num_shards()))

    def _capacity(self, num_tokens: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return dispatch.capacity(num_tokens, self.num_experts, self.method.k, self.capacity_factor)
