"""A dense feed-forward network. Axes: d model width, f hidden width."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax.dispatch.feed_forward import Activation, activation_function


class Mlp(nn.Module):
    """activation(x w_in + b_in) w_out + b_out; with glu activation(x w_gate) * (x w_in + b_in).

    The arithmetic of one expert of ``moe_jax.dispatch.moe``. GLU: Shazeer (2020, arXiv:2002.05202).

    Attributes:
      width: f.
      activation: elementwise function, or the name of one in jax.nn.
      glu: adds the gate matrix.
      use_bias: adds both biases, initially 0; the gate has none.
      dropout: rate on the output.
      dtype: compute dtype; parameters are float32.
    """

    width: int
    activation: Activation = "gelu"
    glu: bool = False
    use_bias: bool = False
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
    ) -> tuple[jax.Array, None]:
        """Maps every position on its own.

        Args:
          x: [..., d].
          valid: bool [...]; the output at invalid positions is exactly 0. None means all valid.
          token_ids: not needed; given to every feed-forward module.
          deterministic: no dropout.

        Returns:
          [..., d] in ``dtype``, and None: no routing took place.
        """
        activation = activation_function(self.activation)

        def linear(width: int, name: str, use_bias: bool):
            return nn.Dense(width, use_bias=use_bias, dtype=self.dtype, name=name)

        if valid is not None:
            # 0 * NaN is NaN: what stands at invalid places must not reach the gradient of a weight.
            x = jnp.where(valid[..., None], x, 0)
        # As a matrix of rows: on CPU XLA takes twice as long over the gradient of [B, S, f].
        rows = x.reshape(-1, x.shape[-1])
        hidden = linear(self.width, "in", self.use_bias)(rows)
        if self.glu:
            hidden = activation(linear(self.width, "gate", False)(rows)) * hidden
        else:
            hidden = activation(hidden)
        y = linear(x.shape[-1], "out", self.use_bias)(hidden).reshape(x.shape)
        y = nn.Dropout(self.dropout)(y, deterministic=deterministic)
        return (y if valid is None else jnp.where(valid[..., None], y, 0)), None
