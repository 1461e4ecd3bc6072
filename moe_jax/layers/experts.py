"""The parameters of expert feed-forward networks.

Axes: E experts, d model width, f expert width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# lecun_normal of each expert on its own. Without batch_axis the expert axis counts as fan-in, and
# the weights come out smaller by sqrt(E).
_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class Experts(nn.Module):
    """Declares the expert weights and returns them as the dict ``moe_jax.dispatch.moe`` takes.

    Attributes:
      num_experts: E.
      width: f.
      glu: adds w_gate, for activation(x @ w_gate) * (x @ w_in + b_in).
      use_bias: adds b_in and b_out, initially 0.
      dtype: dtype of the returned arrays; the parameters are float32.
    """

    num_experts: int
    width: int
    glu: bool = False
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, model_width: int) -> dict[str, jax.Array]:
        """Declares the weights for d = model_width.

        Returns:
          {"w_in": [E, d, f], "w_out": [E, f, d]}; with glu "w_gate" [E, d, f] as well, with
          use_bias "b_in" [E, f] and "b_out" [E, d].
        """
        shapes = {
            "w_in": (self.num_experts, model_width, self.width),
            "w_out": (self.num_experts, self.width, model_width),
        }
        if self.glu:
            shapes["w_gate"] = shapes["w_in"]
        if self.use_bias:
            shapes["b_in"] = (self.num_experts, self.width)
            shapes["b_out"] = (self.num_experts, model_width)

        def declare(name: str) -> jax.Array:
            init = nn.initializers.zeros if name.startswith("b_") else _init
            return self.param(name, init, shapes[name], jnp.float32).astype(self.dtype)

        return {name: declare(name) for name in shapes}
