"""The fused router against softmax_top_k and positions, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_jax.dispatch import moe, positions
from moe_jax.kernels import fused_router
from moe_jax.routing import ConstantGateWarning, expert_counts, softmax_top_k

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("renormalize", [False, True])
def test_like_the_separate_steps(renormalize):
    logits = jax.random.normal(jax.random.key(0), (41, 7)).at[3, 2].set(-jnp.inf)
    valid = jnp.arange(41) % 5 > 0
    weight = jax.random.normal(jax.random.key(1), (41, 3))

    def fused(logits):
        routing, _, _ = fused_router(logits, 3, renormalize=renormalize, valid=valid)
        return jnp.sum(weight * routing.gate), routing

    def separate(logits):
        routing = softmax_top_k(logits, 3, renormalize=renormalize, valid=valid)
        return jnp.sum(weight * routing.gate), routing

    d_logits, got = jax.jit(jax.grad(fused, has_aux=True))(logits)
    want_d_logits, want = jax.jit(jax.grad(separate, has_aux=True))(logits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
    np.testing.assert_allclose(d_logits, want_d_logits, atol=1e-6)
    _, position, counts = fused_router(logits, 3, valid=valid)
    np.testing.assert_array_equal(position, positions(want.expert, 7, priority="arrival"))
    np.testing.assert_array_equal(counts, expert_counts(want.expert, 7))


def test_finite_differences():
    logits = 3 * jax.random.normal(jax.random.key(0), (5, 4))
    check_grads(
        lambda logits: jnp.sum(jnp.sin(fused_router(logits, 2)[0].gate)),
        (logits,),
        order=1,
        modes=("rev",),
        atol=2e-2,
        rtol=2e-2,
        eps=1e-3,
    )


def test_its_positions_serve_dispatch():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (20, 4))
    experts = {
        "w_in": jax.random.normal(keys[1], (5, 4, 6)),
        "w_out": jax.random.normal(keys[2], (5, 6, 4)),
    }
    routing, position, _ = fused_router(x @ jnp.ones((4, 5)), 2)
    y, dropped = moe(x, routing, experts, position=position, capacity=3)
    want, want_dropped = moe(x, routing, experts, capacity=3)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(dropped, want_dropped)
    with pytest.raises(ValueError, match=r"position: got shape \(3,\); allowed: \(20, 2\)"):
        moe(x, routing, experts, position=position[:3, 0])


def test_bad_input():
    with pytest.raises(ValueError, match="k: got 4"):
        fused_router(jnp.zeros((2, 3)), 4)
    with pytest.raises(ValueError, match="backend: got 'x'"):
        fused_router(jnp.zeros((2, 3)), 1, backend="x")


def test_a_constant_gate_is_told():
    with pytest.warns(ConstantGateWarning, match="k=1"):
        routing, _, _ = fused_router(jnp.ones((3, 4)), 1, renormalize=True)
    np.testing.assert_array_equal(routing.gate, 1.0)
