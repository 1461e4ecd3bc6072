"""Router temperature, fixed or scheduled by the norm of the router's matrix.

The gate softmax(x w / tau) has the Lipschitz constant |w|_2 / (2 tau), so a temperature that
follows the spectral norm of w bounds it.

Axis legend: T tokens, d width, E experts, k choices, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax.routing.router import SoftmaxRouter
from moe_jax.routing.types import check_number, check_whole


def power_iteration(w: jax.Array, v: jax.Array, *, steps: int = 1) -> tuple[jax.Array, jax.Array]:
    """Estimates the spectral norm of w: v <- w w^T v, normalised, and sigma = |w^T v|.

    Args:
      w: float[d, E].
      v: float[d], from the last time, or any vector that is not orthogonal to the answer.
      steps: how often.

    Returns:
      sigma f32[], never above the spectral norm, and v f32[d] of norm 1 for the next time. For w =
      0, or v orthogonal to all columns, sigma is 0 and v stays what it was, normalised.

    Raises:
      ValueError: shapes that do not fit, steps < 1.
    """
    w, v = jnp.asarray(w, jnp.float32), jnp.asarray(v, jnp.float32)
    if w.ndim != 2 or v.shape != w.shape[:1]:
        raise ValueError(f"w, v: got shapes {w.shape}, {v.shape}; allowed: [d, E], [d]")
    if steps < 1:
        raise ValueError(f"steps: got {steps}; allowed: 1 or more")

    def step(_, v):
        new = _matvec(w, _matvec(w.T, v))
        norm = jnp.linalg.norm(new)
        return jnp.where(norm > 0, new / jnp.where(norm > 0, norm, 1.0), v)

    norm = jnp.linalg.norm(v)
    v = jax.lax.fori_loop(0, steps, step, v / jnp.where(norm > 0, norm, 1.0))
    return jnp.linalg.norm(_matvec(w.T, v)), v


def scheduled_temperature(sigma: jax.Array, target: float, minimum: float) -> jax.Array:
    """max(minimum, sigma / (2 target)): the temperature at which the gate's constant is target.

    Args:
      sigma: f32[], spectral norm of the router's matrix.
      target: highest Lipschitz constant of the gate wanted, > 0.
      minimum: lowest temperature, > 0.

    Raises:
      ValueError: target or minimum not > 0.
    """
    for name, value in (("target", target), ("minimum", minimum)):
        if not value > 0:
            raise ValueError(f"{name}: got {value}; allowed: numbers > 0")
    return jnp.maximum(minimum, sigma / (2.0 * target))


def _matvec(w, v):
    return jnp.matmul(w, v, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperatureTopK(SoftmaxRouter):
    """``softmax_top_k`` of logits divided by a fixed temperature.

    Attributes:
      temperature: tau > 0.
    """

    temperature: float = 1.0

    def __post_init__(self):
        check_number("temperature", self.temperature, above=0)

    def logits(self, inputs, weights, state):
        return super().logits(inputs, weights, state) / self.temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledTopK(SoftmaxRouter):
    """``softmax_top_k`` of logits over a temperature that follows the norm of the router's matrix.

    After every optimizer step, power iteration goes on from where it was and gives the temperature
    of the next step; evaluation takes it as it is. No gradient passes through it.

    Attributes:
      target: highest Lipschitz constant of the gate, as ``scheduled_temperature`` takes it.
      minimum: lowest temperature.
      power_steps: of power iteration per optimizer step.
      warm_start_steps: of power iteration before the first, without which the estimate is too low.
    """

    target: float = 4.0
    minimum: float = 0.25
    power_steps: int = 1
    warm_start_steps: int = 20

    def __post_init__(self):
        check_number("target", self.target, above=0)
        check_number("minimum", self.minimum, above=0)
        check_whole("power_steps", self.power_steps, at_least=1)
        check_whole("warm_start_steps", self.warm_start_steps, at_least=1)

    def state(self, key, weights, num_experts):
        kernel = weights["kernel"]
        v = jax.random.normal(key, kernel.shape[:1], jnp.float32)
        sigma, v = power_iteration(kernel, v, steps=self.warm_start_steps)
        return self._state(sigma, v)

    def logits(self, inputs, weights, state):
        return super().logits(inputs, weights, state) / state["temperature"]

    def update(self, state, weights, observed):
        step = jax.vmap(lambda w, v: power_iteration(w, v, steps=self.power_steps))
        return self._state(*step(weights["kernel"], state["v"]))

    def report(self, weights, state):
        lipschitz = state["sigma"] / (2.0 * state["temperature"])
        return {"temperature": state["temperature"], "gate_lipschitz": lipschitz}

    def _state(self, sigma, v):
        temperature = scheduled_temperature(sigma, self.target, self.minimum)
        return {"v": v, "sigma": sigma, "temperature": temperature}
