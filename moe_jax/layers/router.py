"""The router's linear map. Axes: d width, E experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

# Fedus et al. (2021, arXiv:2101.03961), section 2.4: truncated normal of variance 0.1/d. Small
# router logits at the start keep the choice of expert near uniform.
_init = nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")


class Router(nn.Module):
    """Router logits x @ kernel, float32 whatever the compute dtype.

    Only x may have been rounded: a bfloat16 product with a cast after it would choose other experts
    for some tokens. Source: selective precision, Switch Transformer, section 2.4.

    Attributes:
      num_experts: E.
    """

    num_experts: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [..., d] of any float dtype to router logits f32 [..., E]."""
        kernel = self.param("kernel", _init, (x.shape[-1], self.num_experts), jnp.float32)
        return jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
