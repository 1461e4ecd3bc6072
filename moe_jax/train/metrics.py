"""The numbers of a step, and the bounded set of scalars that is kept of them.

Axis legend: L layers with experts, E experts.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from moe_jax.routing import RoutingStatistics
from moe_jax.train.state import Skipped


class Metrics(NamedTuple):
    """What one training step says of itself; device arrays.

    Attributes:
      loss: f32[], what was minimised: cross_entropy and the weighted auxiliary losses.
      cross_entropy: f32[], nats per valid token, mean over the whole batch.
      load_balance: f32[], unweighted, mean over layers. None for a dense model, and for methods
        without assignments of tokens.
      z: f32[], unweighted, mean over layers; None for a dense model, as is
      routing: of the whole batch, with a leading axis L in every field.
      router_losses: the routing method's own losses by name, weighted, f32[], means over layers.
      gradient_norm: f32[], global norm before clipping.
      learning_rate: f32[], of this step's update.
      num_tokens: i32[], valid target tokens of the batch.
      report: what the routing method says of itself after the step, by name, f32[], means over
        layers.
      skipped: i32[] each, up to this step; None where nothing is skipped.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    load_balance: jax.Array | None
    z: jax.Array | None
    routing: RoutingStatistics | None
    router_losses: dict[str, jax.Array]
    gradient_norm: jax.Array
    learning_rate: jax.Array
    num_tokens: jax.Array
    report: dict[str, jax.Array]
    skipped: Skipped | None = None


def train_scalars(metrics: Metrics) -> dict[str, float]:
    """The scalars of a step by name; their number depends on neither L nor E."""
    scalars = {
        "loss": metrics.loss,
        "cross_entropy": metrics.cross_entropy,
        "perplexity": perplexity(metrics.cross_entropy),
        "gradient_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rate,
    }
    if metrics.skipped is not None:
        scalars["skipped_steps"] = metrics.skipped.total
    if metrics.routing is not None:
        if metrics.load_balance is not None:
            scalars["load_balance"] = metrics.load_balance
        scalars["z"] = metrics.z
        scalars |= {f"router_loss_{name}": loss for name, loss in metrics.router_losses.items()}
        scalars |= {f"router_{name}": value for name, value in metrics.report.items()}
        scalars |= routing_scalars(metrics.routing)
    return {name: float(value) for name, value in scalars.items()}


def routing_scalars(statistics: RoutingStatistics) -> dict[str, float]:
    """Statistics [L] and [L, E] reduced over layers; the extreme is always the worst layer's."""
    scalars = {
        "load_cv_mean": np.mean(statistics.load_cv),
        "load_cv_max": np.max(statistics.load_cv),
        "dropped_fraction_mean": np.mean(statistics.dropped_fraction),
        "dropped_fraction_max": np.max(statistics.dropped_fraction),
        "load_entropy_mean": np.mean(statistics.load_entropy),
        "load_entropy_min": np.min(statistics.load_entropy),
        "max_share_mean": np.mean(statistics.max_share),
        "max_share_max": np.max(statistics.max_share),
        "dead_experts": np.sum(statistics.dead_experts),
        "router_entropy_mean": np.mean(statistics.router_entropy),
        "router_z_mean": np.mean(statistics.router_z),
        "active_experts_mean": np.mean(statistics.active_experts),
        "unrouted_fraction_mean": np.mean(statistics.unrouted_fraction),
        "unrouted_fraction_max": np.max(statistics.unrouted_fraction),
    }
    return {name: float(value) for name, value in scalars.items()}


def perplexity(cross_entropy: float) -> float:
    """exp of nats per token; finite for every finite cross-entropy."""
    return math.exp(min(float(cross_entropy), 700.0))
