"""The cosine router: logits that measure direction only.

Axis legend: T tokens, d width, E experts, k choices, p width of the projection.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from moe_jax.routing.logits import cosine_logits
from moe_jax.routing.router import SoftmaxRouter, Weight, mask_experts
from moe_jax.routing.types import check_number, check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineTopK(SoftmaxRouter):
    """``softmax_top_k`` of ``cosine_logits``, with a learned scale (Chi et al. 2022; GMoE).

    Attributes:
      projection_width: p.
      initial_scale: of the logits; the scale is learned as its logarithm,
      highest_scale: and stays below this.
    """

    projection_width: int = 256
    initial_scale: float = 2.0
    highest_scale: float = 100.0

    def __post_init__(self):
        check_whole("projection_width", self.projection_width, at_least=1)
        check_number("initial_scale", self.initial_scale, above=0)
        check_number("highest_scale", self.highest_scale, at_least=self.initial_scale)

    def weights(self, width, num_experts):
        initializers = jax.nn.initializers
        return {
            "projection": Weight((width, self.projection_width), initializers.lecun_normal()),
            "expert_embedding": Weight(
                (self.projection_width, num_experts), initializers.normal(0.01)
            ),
            "log_scale": Weight((), initializers.constant(math.log(self.initial_scale))),
        }

    def logits(self, inputs, weights, state):
        logits = cosine_logits(
            inputs.x, weights["projection"], weights["expert_embedding"], self._scale(weights)
        )
        return mask_experts(logits, inputs.expert_mask)

    def report(self, weights, state):
        return {"scale": self._scale(weights)}

    def _scale(self, weights):
        return jnp.minimum(jnp.exp(weights["log_scale"]), self.highest_scale)
