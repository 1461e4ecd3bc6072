"""Parameters, state and randomness for a routing method.

Axes: T tokens, d width, E experts, k choices.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moe_jax import routing
from moe_jax.kernels import fused_router
from moe_jax.routing import Routed, RouterInputs, expert_dropout, input_jitter


class Router(nn.Module):
    """Declares what a routing method learns and carries, and routes with it, in float32.

    Variables: the method's weights in the collection "params", its state in "router_state" (which
    only ``Router.update`` of the method changes, between steps), and in "replay" perhaps an array
    "chosen" to be repeated.

    Attributes:
      method: of ``moe_jax.routing``.
      num_experts: E.
      input_jitter: in training, as ``routing.input_jitter`` takes it.
      expert_dropout: in training, the rate of ``routing.expert_dropout``.
      fused: where the method is softmax_top_k of its logits, let ``moe_jax.kernels.fused_router``
        choose, which knows the positions too; the gates then have one derivative, in reverse mode.
    """

    method: routing.Router
    num_experts: int
    input_jitter: float = 0.0
    expert_dropout: float = 0.0
    fused: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        valid: jax.Array | None = None,
        token_ids: jax.Array | None = None,
        num_sequences: int = 1,
        capacity: int | None = None,
        deterministic: bool = True,
    ) -> tuple[Routed, jax.Array | None, dict[str, jax.Array]]:
        """Routes tokens.

        Args:
          x: [T, d] of any float dtype.
          valid: bool[T].
          token_ids: i32[T].
          num_sequences: the tokens are so many sequences one after the other.
          capacity: C, for methods in which the expert chooses.
          deterministic: evaluation; otherwise the RNG collection "router" is needed.

        Returns:
          What the method returns; i32[T, k], the positions of the assignments in order of arrival,
          or None where the kernel did not choose; and the method's report.
        """
        weights = {
            name: self.param(name, weight.init, weight.shape, jnp.float32)
            for name, weight in self.method.weights(x.shape[-1], self.num_experts).items()
        }
        state = self._carried(weights)
        inputs = RouterInputs(x, valid, token_ids)
        if not deterministic:
            inputs = self._perturbed(inputs, self.make_rng("router"))
        if self.has_variable("replay", "chosen"):
            inputs = inputs._replace(chosen=self.get_variable("replay", "chosen"))
        keywords = self.method.as_softmax_top_k() if self.fused else None
        report = self.method.report(weights, state)
        if keywords is None or inputs.chosen is not None:
            sizes = dict(num_sequences=num_sequences, capacity=capacity)
            return self.method.route(inputs, weights, state, **sizes), None, report
        logits = self.method.logits(inputs, weights, state)
        choice, position, _ = fused_router(logits, self.method.k, valid=inputs.valid, **keywords)
        losses = self.method.losses(choice, inputs, weights, state)
        return Routed(choice, choice.logits, losses), position, report

    def _carried(self, weights):
        def first(key):
            return self.method.state(key, weights, self.num_experts)

        if not jax.tree.leaves(jax.eval_shape(first, jax.random.key(0))):
            return {}
        return self.variable("router_state", "state", lambda: first(self.make_rng("params"))).value

    def _perturbed(self, inputs, key):
        method_key, jitter_key, dropout_key = jax.random.split(key, 3)
        x, mask = input_jitter(inputs.x, jitter_key, self.input_jitter), None
        if self.expert_dropout:
            if not self.method.can_leave_out_experts:
                name = type(self.method).__name__
                raise ValueError(
                    f"Router.expert_dropout: got {self.expert_dropout}; allowed: 0 with {name}"
                )
            mask = expert_dropout(
                dropout_key, self.num_experts, self.expert_dropout, at_least=self.method.k
            )
        return inputs._replace(x=x, key=method_key, expert_mask=mask)
