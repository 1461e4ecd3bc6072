"""Kernels inside jax.shard_map: interpreted for numbers, compiled for proof.

Run as a script, in a process of its own, this file compiles for one target.
"""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.dispatch import dropless, moe
from moe_jax.kernels import fused_router, reference

# Mosaic GPU does without the checks of jax.shard_map, and says so.
PLACES = {"v5p": ("pallas_tpu", True), "h100": ("mosaic_gpu", False)}
TOKENS, EVERYWHERE = jax.P("x"), jax.P()


def loss_of(layer):
    """Gradients of a sum that all devices add to."""

    def loss(x, router, experts):
        return jnp.sum(jnp.sin(layer(x, router, experts).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))


def inside(layer, **options):
    specs = (TOKENS, EVERYWHERE, EVERYWHERE)
    return jax.shard_map(layer, in_specs=specs, out_specs=TOKENS, **options)


def make_arguments(make):
    experts = {"w_in": make(4, 128, 256), "w_out": make(4, 256, 128), "b_out": make(4, 128)}
    return make(256, 128), make(128, 4), experts


def compile_inside(target):
    from moe_jax.kernels.targets import compile_for

    backend, checked = PLACES[target]

    def layer(x, router, experts):
        routing, position, _ = fused_router(x @ router, 2, renormalize=True)
        return moe(x, routing, experts, position=position, backend=backend)[0]

    arguments = make_arguments(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    compile_for(target, loss_of(inside(layer, check_vma=checked)), *arguments)
    if not checked:
        with pytest.raises(NotImplementedError, match="got check_vma=True; allowed: False"):
            compile_for(target, loss_of(inside(layer)), *arguments)


@pytest.mark.compiler
@pytest.mark.parametrize("target", PLACES)
def test_compiles_inside_shard_map(target):
    needed = {"v5p": "libtpu", "h100": "jax_plugins.xla_cuda13"}[target]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    from moe_jax.kernels.targets import ENVIRONMENT

    command = [sys.executable, __file__, target]
    run = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.interpreted
def test_numbers_of_the_tpu_kernels():
    from moe_jax.kernels.pallas_tpu.backend import interpreted

    def layer(x, router, experts, *, backend):
        """As ``dispatch.moe`` does it, on a backend that is interpreted; the router is XLA's."""
        routing, position, _ = fused_router(x @ router, 2, renormalize=True)
        return dropless.dropless_moe(
            x,
            routing.expert,
            routing.gate,
            position,
            experts,
            capacity=None,
            activation=jnp.tanh,
            backend=backend,
        )

    rng = np.random.default_rng(0)
    arguments = make_arguments(lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32) / 8)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ours = inside(lambda *a: layer(*a, backend=interpreted()), mesh=mesh)
    got = jax.block_until_ready(jax.jit(loss_of(ours))(*arguments))
    want = loss_of(lambda *a: layer(*a, backend=reference.BACKEND))(*arguments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, got, want)


if __name__ == "__main__":
    compile_inside(sys.argv[1])
