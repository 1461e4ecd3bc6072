"""A layer whose experts are spread over four accelerators, compiled by their compilers.

Run as a script, in a process of its own, this file compiles for one target.
"""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax.dispatch import ExpertParallel, moe
from moe_jax.dispatch.exchange import OVERLAP_OPTIONS
from moe_jax.routing import softmax_top_k

# By target: the compiler's package, how jax finds four devices, the kernels.
TARGETS = {
    "v5p": ("libtpu", dict(topology_name="v5p:2x2x1"), "pallas_tpu"),
    "h100": ("jax_plugins.xla_cuda13", dict(topology="1x1x4"), "mosaic_gpu"),
}
T, D, F, E, K = 1024, 256, 512, 8, 2


def devices_of(target):
    from jax.experimental import topologies

    from moe_jax.kernels.targets import TARGETS as KERNEL_TARGETS

    return topologies.get_topology_desc(**KERNEL_TARGETS[target] | TARGETS[target][1]).devices


def step(x, router, experts, shared, *, parallel, backend):
    """Gradients through router, exchange, experts, and a layer that all tokens pass besides."""

    def loss(x, router, experts, shared):
        y, _ = moe(
            x,
            softmax_top_k(x @ router, K),
            experts,
            parallel=parallel,
            backend=backend,
            capacity=T,
        )
        return jnp.sum(jnp.sin((y + jax.nn.gelu(x @ shared) @ shared.T).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2, 3))(x, router, experts, shared)


def compile_on(target, exchange, num_nodes=1):
    mesh = jax.make_mesh(
        (1, 4, 1),
        ("data", "expert", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices_of(target)[:4],
    )
    parallel = ExpertParallel(
        ("data", "expert"), "expert", "tensor", exchange=exchange, num_nodes=num_nodes
    )

    def shape(spec, *sizes):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    whole, split = PartitionSpec(), PartitionSpec("expert")
    arguments = (
        shape(PartitionSpec(("data", "expert")), T, D),
        shape(whole, D, E),
        {"w_in": shape(split, E, D, F), "w_out": shape(split, E, F, D)},
        shape(whole, D, F),
    )
    function = functools.partial(step, parallel=parallel, backend=TARGETS[target][2])
    platform = "cuda" if target == "h100" else "tpu"
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        options = OVERLAP_OPTIONS["gpu" if target == "h100" else "tpu"]
        return lowered.compile(compiler_options=options).as_text()


def products_while_rows_travel(text):
    """How many matrix products are scheduled between the start of an exchange and its end."""
    travelling, products = set(), 0
    for line in text[text.index("\nENTRY") :].splitlines():
        # Not by one pattern: a line may hold a whole kernel.
        name, _, rest = line.strip().partition(" = ")
        call = rest[:2000]
        if "all-to-all-start(" in call:
            travelling.add(name)
        elif "all-to-all-done(" in call:
            travelling.discard(call.partition("all-to-all-done(")[2].partition(")")[0])
        elif "dot_general" in rest and ("fusion(" in call or "custom-call(" in call):
            products += bool(travelling)
    return products


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    if importlib.util.find_spec(TARGETS[target][0]) is None:
        pytest.skip(f"{TARGETS[target][0]} is not installed")
    from moe_jax.kernels.targets import ENVIRONMENT

    command = [sys.executable, __file__, target]
    run = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


if __name__ == "__main__":
    ragged = compile_on(sys.argv[1], "ragged")
    assert "ragged-all-to-all" in ragged
    padded = compile_on(sys.argv[1], "padded", num_nodes=2)
    assert "all-to-all" in padded and "ragged" not in padded
    assert products_while_rows_travel(padded) > 0
    if len(sys.argv) > 2:
        print(ragged if sys.argv[2] == "ragged" else padded)
