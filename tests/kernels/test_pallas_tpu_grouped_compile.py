"""The grouped products compile for every TPU, with no more work and memory than they should need.

Run as a script, in a process of its own, this file compiles for one target and prints what the
compiler says.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# rows, a, b, groups, dtype, pieces.
CASES = {
    # 8192 tokens with two choices, of a model of width 1024 with experts of width 4096.
    "first, 8 experts": (16384, 1024, 4096, 8, "bfloat16", "hidden glu transposed outer"),
    "second, 8 experts": (16384, 4096, 1024, 8, "bfloat16", "matmul epilogue"),
    "first, 64 experts": (16384, 1024, 4096, 64, "bfloat16", "glu outer"),
    "odd": (1000, 72, 200, 5, "bfloat16", "matmul epilogue hidden glu transposed outer"),
    "odd, float32": (1000, 72, 200, 5, "float32", "matmul epilogue hidden glu transposed outer"),
    # The inner width in several parts.
    "odd parts": (1000, 9000, 1200, 5, "bfloat16", "epilogue outer"),
    "one row": (1, 72, 200, 1, "bfloat16", "epilogue outer"),
}


def _piece(name, num_rows, a, b, num_groups, dtype):
    """A function, its arguments and the products of the size of a dense layer it needs."""
    import jax
    import jax.numpy as jnp

    from moe_jax.kernels.pallas_tpu import grouped

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    lhs, w, bias = array(num_rows, a), array(num_groups, a, b), array(num_groups, b)
    sizes = array(num_groups, dtype=jnp.int32)
    scale = array(num_rows, dtype=jnp.float32)

    def epilogue(lhs, w, sizes, bias, scale):
        return grouped.matmul(lhs, w, sizes, bias=bias, scale=scale)

    def transposed(lhs, w, sizes, scale):
        return grouped.matmul(lhs, w, sizes, scale=scale, transposed=True)

    def hidden(lhs, w, bias, sizes):
        return grouped.hidden(lhs, w, None, bias, sizes, jax.nn.gelu)

    def glu(lhs, w, w_gate, bias, sizes):
        return grouped.hidden(lhs, w, w_gate, bias, sizes, jax.nn.silu)

    def outer(lhs, rhs, sizes, scale):
        return grouped.outer(lhs, rhs, sizes, scale=scale, dtype=dtype)

    return {
        "matmul": (grouped.matmul, (lhs, w, sizes), 1),
        "epilogue": (epilogue, (lhs, w, sizes, bias, scale), 1),
        "transposed": (transposed, (lhs, array(num_groups, b, a), sizes, scale), 1),
        "hidden": (hidden, (lhs, w, bias, sizes), 1),
        "glu": (glu, (lhs, w, w, bias, sizes), 2),
        "outer": (outer, (lhs, array(num_rows, b), sizes, scale), 1),
    }[name]


def _compile_all(target):
    """Operations as a share of a dense layer's, and bytes of temporaries, of cases and pieces."""
    from moe_jax.kernels.targets import compile_for

    report = {}
    for case, (num_rows, a, b, num_groups, dtype, pieces) in CASES.items():
        for name in pieces.split():
            function, arguments, products = _piece(name, num_rows, a, b, num_groups, dtype)
            compiled = compile_for(target, function, *arguments)
            flops = compiled.cost_analysis()["flops"] / (2 * num_rows * a * b * products)
            memory = compiled.memory_analysis().temp_size_in_bytes
            report[f"{case}: {name}"] = dict(flops=flops, memory=memory)
    return report


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e"])
def test_compiles(target):
    from moe_jax.kernels.targets import ENVIRONMENT

    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compiler for TPU is not installed")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, __file__, target], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert len(report) == sum(len(pieces.split()) for *_, pieces in CASES.values())
    for case, costs in report.items():
        assert costs["flops"] < 1.1, case
        if "experts" in case:
            # What the steps work on, and no copies of rows or matrices, of which even the
            # smallest has 8 MiB.
            assert costs["memory"] < 2**21, case


if __name__ == "__main__":
    print(json.dumps(_compile_all(sys.argv[1])))
