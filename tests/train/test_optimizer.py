import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.train.build import make_initial_state, make_model
from moe_jax.train.optimizer import decay_mask, learning_rate_schedule, make_optimizer


def test_schedule_by_hand():
    schedule = learning_rate_schedule(2.0, steps=14, warmup_steps=4, final_fraction=0.1)
    got = [float(schedule(count)) for count in range(14)]
    # Warmup: 2 * (count + 1) / 4.
    np.testing.assert_allclose(got[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    # Halfway through the ten steps of the cosine: (2 + 0.2) / 2; at its end 0.2.
    np.testing.assert_allclose(got[8], 1.1, rtol=1e-6)
    np.testing.assert_allclose(got[13], 0.2, rtol=1e-6)
    assert got[4:] == sorted(got[4:], reverse=True)


@pytest.mark.parametrize("steps, warmup", [(1, 0), (5, 0), (2, 1)])
def test_short_schedules_end_at_the_final_value(steps, warmup):
    schedule = learning_rate_schedule(1.0, steps=steps, warmup_steps=warmup, final_fraction=0.5)
    np.testing.assert_allclose(schedule(steps - 1), 0.5, rtol=1e-6)
    assert float(schedule(0)) > 0


# The parameters that a matrix product or a table look-up uses, by what the names mean.
MATRICES = {"kernel", "embedding", "w_in", "w_gate", "w_out"}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_decay_reaches_matrices_only(tiny, scan, tie):
    config = tiny(
        **{
            "model.scan_layers": scan,
            "model.tie_embeddings": tie,
            "model.use_bias": True,
            "model.glu": True,
            "moe.every": 2,
            "moe.num_shared_experts": 1,
        }
    )
    state = jax.eval_shape(lambda: make_initial_state(config, make_model(config, 11)))
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(state.params))
    shapes = dict(jax.tree_util.tree_leaves_with_path(state.params))
    decayed = {path[-1].key for path, yes in mask if yes}
    kept = {path[-1].key for path, yes in mask if not yes}
    assert decayed == MATRICES and kept == {"scale", "bias", "b_in", "b_out"}
    # Where the number of axes misleads: expert biases [E, f], scales of scanned layers [L, d].
    misleading = [path for path, yes in mask if not yes and shapes[path].ndim >= 2]
    assert misleading


def test_decay_shrinks_by_learning_rate_times_decay():
    params = {"norm": {"scale": jnp.ones(3)}, "experts": {"w_in": jnp.ones((2, 3, 4))}}
    params["experts"]["b_in"] = jnp.ones((2, 4))
    optimizer = make_optimizer(lambda count: 0.1, weight_decay=0.5, b1=0.9, b2=0.95, clip_norm=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["experts"]["w_in"], -0.05, rtol=1e-6)  # 0.1 * 0.5 * 1
    assert not np.any(updates["experts"]["b_in"]) and not np.any(updates["norm"]["scale"])


def test_the_gradient_is_clipped_by_its_global_norm():
    params = {"a": {"kernel": jnp.zeros(2)}, "b": {"kernel": jnp.zeros(1)}}
    gradient = {"a": {"kernel": jnp.array([30.0, 0.0])}, "b": {"kernel": jnp.array([40.0])}}
    optimizer = make_optimizer(lambda count: 1.0, weight_decay=0.0, b1=0.0, b2=0.0, clip_norm=0.5)
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    moments = jax.tree.leaves(state)  # with b1 = 0 the first moment is the clipped gradient
    flat = np.concatenate([np.ravel(m) for m in moments if np.size(m) and np.any(m)])
    # 30 and 40 have norm 50; clipped to 0.5 they are 0.3 and 0.4.
    for expected in (0.3, 0.4):
        assert np.any(np.isclose(flat, expected, rtol=1e-5))


def test_an_unknown_parameter_name_is_refused():
    with pytest.raises(ValueError, match="gamma.*no rule for weight decay"):
        decay_mask({"layer": {"gamma": jnp.ones(3)}})
