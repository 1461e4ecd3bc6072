import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.routing import RoutingStatistics, load_statistics
from moe_jax.train.metrics import Metrics, perplexity, routing_scalars, train_scalars


def statistics_of(load, dropped=None):
    load = np.asarray(load)
    dropped = np.zeros_like(load) if dropped is None else np.asarray(dropped)
    counted = jax.vmap(load_statistics)(jnp.asarray(load), jnp.asarray(dropped))
    layers = np.arange(len(load), dtype=np.float32)
    return RoutingStatistics(
        load,
        dropped,
        *counted,
        router_entropy=layers,
        router_z=layers,
        active_experts=layers,
        unrouted_fraction=layers,
    )


def metrics_of(routing):
    balance = None if routing is None else jnp.float32(1.0)
    return Metrics(
        loss=jnp.float32(2.0),
        cross_entropy=jnp.float32(1.5),
        load_balance=balance,
        z=balance,
        routing=routing,
        router_losses={} if routing is None else {"boundary": jnp.float32(0.25)},
        gradient_norm=jnp.float32(0.5),
        learning_rate=jnp.float32(0.1),
        num_tokens=jnp.int32(8),
        report={} if routing is None else {"epsilon": jnp.float32(0.125)},
    )


def test_scalars_by_hand():
    # One expert takes 6 of 8 and two are dead: share .75, entropy -(.75 ln .75 + .25 ln .25).
    scalars = routing_scalars(statistics_of([[6, 2, 0, 0], [2, 2, 2, 2]], [[2, 0, 0, 0], [0] * 4]))
    assert scalars["max_share_max"] == 0.75 and scalars["max_share_mean"] == 0.5
    assert scalars["dead_experts"] == 2
    assert scalars["load_entropy_min"] == pytest.approx(0.5623, abs=1e-4)
    assert scalars["load_entropy_mean"] == pytest.approx((0.5623 + np.log(4)) / 2, abs=1e-4)
    # Loads of mean 2 and standard deviation sqrt((16 + 0 + 4 + 4) / 4) = 2.449.
    assert scalars["load_cv_max"] == pytest.approx(2.449 / 2, abs=1e-3)
    assert scalars["dropped_fraction_max"] == 0.25 and scalars["dropped_fraction_mean"] == 0.125
    assert scalars["router_entropy_mean"] == scalars["router_z_mean"] == 0.5
    assert scalars["active_experts_mean"] == scalars["unrouted_fraction_mean"] == 0.5
    assert scalars["unrouted_fraction_max"] == 1


@pytest.mark.parametrize("layers, experts", [(1, 2), (3, 5), (24, 64)])
def test_the_number_of_scalars_depends_on_neither_layers_nor_experts(layers, experts):
    load = np.ones((layers, experts), int)
    scalars = train_scalars(metrics_of(statistics_of(load)))
    assert len(scalars) == 5 + 2 + 2 + 14
    assert scalars["router_loss_boundary"] == 0.25 and scalars["router_epsilon"] == 0.125
    assert all(type(value) is float for value in scalars.values())


def test_a_dense_run_has_no_routing_scalars():
    scalars = train_scalars(metrics_of(None))
    assert set(scalars) == {
        "loss",
        "cross_entropy",
        "perplexity",
        "gradient_norm",
        "learning_rate",
    }
    assert scalars["perplexity"] == pytest.approx(np.exp(1.5))


def test_perplexity_is_finite():
    assert perplexity(0.0) == 1.0
    assert np.isfinite(perplexity(1e30))
