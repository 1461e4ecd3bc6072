"""A routing method with everything that a layer and a trainer need to know about it.

The methods are pure functions of logits, one file each. A Router puts one of them to use: it says
which arrays the method learns, which it carries from step to step without a gradient, what it adds
to the loss, and how it makes its choice from tokens.

Axis legend: T tokens, d width, E experts, k choices, K slots, C capacity, G sequences, L layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.routing.logits import linear_logits
from moe_jax.routing.token_choice import softmax_top_k
from moe_jax.routing.types import Choice, TokenChoice, check_count

# Fedus et al. (2021, arXiv:2101.03961), section 2.4: truncated normal of variance 0.1/d. Small
# router logits at the start keep the choice of expert near uniform.
kernel_init = jax.nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")


class Weight(NamedTuple):
    """A float32 array to be learned: its shape, and (key, shape, dtype) -> its first value."""

    shape: tuple[int, ...]
    init: Callable[..., jax.Array]


class RouterInputs(NamedTuple):
    """The tokens of one call and what may be known of them.

    Attributes:
      x: float[T, d].
      valid: bool[T]; None: all are.
      token_ids: i32[T] of the vocabulary; None where there is none.
      key: for the randomness of training. None in evaluation, which has none.
      expert_mask: bool[E], the experts that may be chosen; None: all.
      chosen: a choice to repeat, with its gates computed anew: i32[T, K] as ``TokenChoice.expert``
        or i32[E, C] as ``ExpertChoice.token``. None: the router chooses.
    """

    x: jax.Array
    valid: jax.Array | None = None
    token_ids: jax.Array | None = None
    key: jax.Array | None = None
    expert_mask: jax.Array | None = None
    chosen: jax.Array | None = None


class Routed(NamedTuple):
    """What a Router makes of its inputs.

    Attributes:
      choice: who goes where, with what weight.
      logits: f32[T, E], what was routed on (summed up for a method whose logits are not [T, E]).
      losses: the method's own losses by name, f32[] each, already weighted.
    """

    choice: Choice
    logits: jax.Array
    losses: dict[str, jax.Array]


class Observed(NamedTuple):
    """What a training step saw of all layers, for ``Router.update``.

    Attributes:
      load: i32[L, E], assignments per expert before any is dropped, over all microbatches.
      num_tokens: i32[], valid tokens of the batch.
      progress: f32[], share of the training that is done after this step, in [0, 1].
    """

    load: jax.Array
    num_tokens: jax.Array
    progress: jax.Array


class CommonLosses(NamedTuple):
    """Default weights of the losses that every router may have; None: it has no such loss."""

    load_balance: float | None
    z: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """Base of all: linear logits x @ kernel, and a choice that ``choose`` makes of them.

    The fields of a subclass are the arguments of its method, each with a default.

    Attributes:
      k: choices per token.
    """

    k: int

    # Whether what a token gets may depend on later tokens: "never", "training" (it does in
    # training alone), "always". Capacity is another matter, see docs/routers.md.
    sees_future: ClassVar[Literal["never", "training", "always"]] = "never"
    # Whether it routes by RouterInputs.token_ids instead of x.
    needs_token_ids: ClassVar[bool] = False
    # Whether it can do without some experts for a step (RouterInputs.expert_mask).
    can_leave_out_experts: ClassVar[bool] = True
    default_losses: ClassVar[CommonLosses] = CommonLosses(load_balance=0.01, z=0.001)
    # Which choices count in the load-balance loss, see ``load_balance_loss``.
    balance_choices: ClassVar[Literal["all", "first"]] = "all"
    # What ``route`` returns.
    choice_type: ClassVar[type] = TokenChoice

    def check(self, num_experts: int) -> None:
        """Checks that the arguments fit so many experts, without computing anything.

        Warns as the method does, such as of a gate that is constant.

        Raises:
          ValueError: the message starts with the name of the argument that does not.
        """
        check_count("k", self.k, num_experts, "the number of experts")
        num_tokens, width = 2 * num_experts, 2

        def use(key):
            weights = {
                name: jnp.zeros(weight.shape)
                for name, weight in self.weights(width, num_experts).items()
            }
            state = self.state(key, weights, num_experts)
            x, ids = jnp.zeros((num_tokens, width)), jnp.zeros(num_tokens, jnp.int32)
            return self.route(RouterInputs(x, token_ids=ids, key=key), weights, state)

        jax.eval_shape(use, jax.random.key(0))

    def weights(self, width: int, num_experts: int) -> dict[str, Weight]:
        """The learned arrays, for d = width and E = num_experts."""
        return {"kernel": Weight((width, num_experts), kernel_init)}

    def state(
        self, key: jax.Array, weights: dict[str, jax.Array], num_experts: int
    ) -> dict[str, jax.Array]:
        """First value of what is carried from step to step without a gradient."""
        del key, weights, num_experts
        return {}

    def logits(self, inputs: RouterInputs, weights: dict, state: dict) -> jax.Array:
        """f32[T, E]; -inf for experts that may not be chosen."""
        del state
        return mask_experts(linear_logits(inputs.x, weights["kernel"]), inputs.expert_mask)

    def choose(
        self, logits: jax.Array, inputs: RouterInputs, weights: dict, state: dict
    ) -> TokenChoice:
        """The choice that the method makes of the logits."""
        raise NotImplementedError

    def as_softmax_top_k(self) -> dict[str, Any] | None:
        """The keywords with which ``choose`` is ``softmax_top_k`` of the logits and nothing else.

        A kernel that does all of that at once may take its place. None: it is something else.
        """
        return None

    def losses(
        self, choice: Choice, inputs: RouterInputs, weights: dict, state: dict
    ) -> dict[str, jax.Array]:
        """The method's own losses by name, weighted; f32[] each."""
        del choice, inputs, weights, state
        return {}

    def route(
        self,
        inputs: RouterInputs,
        weights: dict[str, jax.Array],
        state: dict[str, jax.Array],
        *,
        num_sequences: int = 1,
        capacity: int | None = None,
    ) -> Routed:
        """Routes the tokens of a call.

        Args:
          inputs: the tokens.
          weights: of the shapes that ``weights`` gives.
          state: as ``state`` gives it.
          num_sequences: G, the tokens are so many sequences one after the other.
          capacity: C, for methods in which the expert chooses.
        """
        del num_sequences, capacity
        logits = self.logits(inputs, weights, state)
        choice = self.choose(logits, inputs, weights, state)
        return Routed(choice, choice.logits, self.losses(choice, inputs, weights, state))

    def update(self, state: dict, weights: dict, observed: Observed) -> dict[str, jax.Array]:
        """The state after an optimizer step; every array has a leading axis L here."""
        del weights, observed
        return state

    def report(self, weights: dict, state: dict) -> dict[str, jax.Array]:
        """Scalars of one layer worth watching, by name; f32[] each."""
        del weights, state
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsRouter(Router):
    """The router of a method that needs nothing but linear logits.

    Attributes:
      method: called as method(logits, k, *, valid, **arguments), with ``chosen`` too in a replay.
      arguments: (name, value) pairs.
    """

    method: Callable[..., TokenChoice]
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, logits: jax.Array, *, valid: jax.Array | None = None, **others):
        """The method itself, with its arguments filled in."""
        return self.method(logits, self.k, valid=valid, **dict(self.arguments), **others)

    def choose(self, logits, inputs, weights, state):
        others = {} if inputs.chosen is None else {"chosen": inputs.chosen}
        return self(logits, valid=inputs.valid, **others)

    def as_softmax_top_k(self):
        return dict(self.arguments) if self.method is softmax_top_k else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxRouter(Router):
    """Base of the routers that are ``softmax_top_k`` of logits of their own.

    Attributes:
      renormalize: as ``softmax_top_k`` takes it.
    """

    renormalize: bool = False

    def choose(self, logits, inputs, weights, state):
        return softmax_top_k(
            logits,
            self.k,
            renormalize=self.renormalize,
            valid=inputs.valid,
            chosen=inputs.chosen,
        )

    def as_softmax_top_k(self):
        return {"renormalize": self.renormalize}


def mask_experts(logits: jax.Array, expert_mask: jax.Array | None) -> jax.Array:
    """The logits [..., E] with -inf for the experts that are not in bool[E]; None: all are."""
    return logits if expert_mask is None else jnp.where(expert_mask, logits, -jnp.inf)
