"""What the compilers for accelerators say of a layer and of a train step, with no accelerator.

Every program is compiled by the real compiler of its target, and what that reports is written
down: floating-point operations and bytes (TPU), temporary memory, collectives, and of our GPU
kernels the most registers of a thread and the bytes spilled. The operations inside a kernel are as
the kernel declares them, useful work: what tiles with rows of two experts cost more is not there.

Axis legend: T tokens, d width, f expert width, E experts, k choices.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from moe_jax.kernels.targets import ENVIRONMENT, TARGETS

SHAPES = {
    "8 experts": dict(T=8192, d=1024, f=4096, E=8, k=2),
    "64 experts": dict(T=8192, d=1024, f=2048, E=64, k=8),
}
BACKENDS = {
    "tpu": ("pallas_tpu", "tokamax", "xla_ragged"),
    "cuda": ("mosaic_gpu", "tokamax"),
}
# Mosaic GPU writes what ptxas says to the folder that this variable names.
_DUMP = "MOSAIC_GPU_DUMP_TO"
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
COLUMNS = (
    "program",
    "target",
    "backend",
    "gflop",
    "flops_over_dense",
    "gbytes",
    "temporary_mb",
    "temporary_over_dense",
    "collectives",
    "registers",
    "spill_bytes",
    "compile_seconds",
    "note",
)


def programs(target: str, shapes: dict):
    """Yields (program, backend, function, arguments); the dense one of a shape comes first."""
    import jax
    import jax.numpy as jnp

    from moe_jax.dispatch import moe
    from moe_jax.kernels import fused_router

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def loss_of(layer):
        return jax.grad(lambda *a: jnp.sum(layer(*a).astype(jnp.float32) ** 2), argnums=(0, 1, 2))

    def dense(x, w_in, w_out):
        return jax.nn.gelu(x @ w_in) @ w_out

    for name, s in shapes.items():
        rows, d, f = s["T"] * s["k"], s["d"], s["f"]
        arguments = (array(rows, d), array(d, f), array(f, d))
        yield f"layer, {name}", "dense", loss_of(dense), arguments
        for backend in BACKENDS[TARGETS[target]["platform"]]:

            def layer(x, router, experts, backend=backend, k=s["k"]):
                routing, position, _ = fused_router(x @ router, k)
                return moe(x, routing, experts, position=position, backend=backend)[0]

            experts = {"w_in": array(s["E"], d, f), "w_out": array(s["E"], f, d)}
            arguments = (array(s["T"], d), array(d, s["E"]), experts)
            yield f"layer, {name}", backend, loss_of(layer), arguments


def train_steps():
    """Yields (program, backend, function, arguments) of the demo's dense and moe train steps."""
    import jax
    import jax.numpy as jnp

    from benchmarks.models import demo_config, our_step

    for variant in ("dense", "moe"):
        config = demo_config(variant)
        config.model.dtype = "bfloat16"
        step, initial_state = our_step(config)
        state = jax.eval_shape(initial_state)
        shape = (config.data.batch_size, config.data.sequence_length + 1)
        batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
        backend = "dense" if variant == "dense" else "default"
        yield "train step of the demo, bf16", backend, step, (state, batch)


def registers(dump: Path) -> dict:
    """What ptxas said of the kernels compiled since the last call: registers and spilled bytes."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(dump.glob("*.ptxas"))]
    for path in dump.iterdir():
        path.unlink()
    used = [int(n) for text in texts for n in re.findall(r"Used (\d+) registers", text)]
    spilled = [int(n) for text in texts for n in re.findall(r"(\d+) bytes spill", text)]
    return dict(registers=max(used), spill_bytes=sum(spilled)) if used else {}


def measure(target: str, program: str, backend: str, function, arguments, dense: dict) -> dict:
    """One row of the report; ``dense`` is the row to compare with, {} for none."""
    import jax

    from moe_jax.kernels.targets import compile_for, device_of

    row = dict.fromkeys(COLUMNS, "") | dict(program=program, target=target, backend=backend)
    start = time.perf_counter()
    # tokamax asks the default device, not the one that is compiled for, what it can do.
    default = mock.patch("jax.extend.backend.get_default_device", lambda: device_of(target))
    try:
        with default:
            compiled = compile_for(target, function, *arguments)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return row | dict(note=str(error).strip().splitlines()[0][:120])
    row["compile_seconds"] = round(time.perf_counter() - start, 1)
    row["temporary_mb"] = round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1)
    costs = compiled.cost_analysis()
    if costs:  # the GPU compiler gives none
        row["gflop"] = round(costs["flops"] / 1e9, 2)
        row["gbytes"] = round(costs["bytes accessed"] / 1e9, 3)
    if target_dump := os.environ.get(_DUMP):
        row |= registers(Path(target_dump))
    found = re.findall(rf"= \S+ ({'|'.join(_COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    row["collectives"] = len(found)
    if dense.get("gflop") and row["gflop"]:
        row["flops_over_dense"] = round(row["gflop"] / dense["gflop"], 3)
    if dense.get("temporary_mb"):
        row["temporary_over_dense"] = round(row["temporary_mb"] / dense["temporary_mb"], 2)
    return row


def report(targets, shapes, *, with_train_step: bool) -> list[dict]:
    """Compiles everything for every target, telling of each as it is done."""
    rows, dense = [], {}
    for target in targets:
        work = list(programs(target, shapes)) + (list(train_steps()) if with_train_step else [])
        for program, backend, function, arguments in work:
            print(f"{target}: {program}, {backend} ...", end=" ", flush=True)
            row = measure(target, program, backend, function, arguments, dense.get(program, {}))
            print(row["note"] or f"{row['compile_seconds']} s", flush=True)
            if backend == "dense":
                dense[program] = row
            rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row[column]) for column in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_report",
        description=__doc__.split("\n\n")[0],
        epilog="example: python -m benchmarks.compile_report --targets v5p --output runs/report;"
        " the compilers: pip install -e '.[compile]'; about ten minutes for all targets",
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder for compile_report.csv and .md")
    parser.add_argument("--quick", action="store_true", help="one small layer, no train step")
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    for target in targets:
        if target not in TARGETS:
            parser.error(f"--targets: got {target!r}; allowed: {', '.join(TARGETS)}")
    shapes = {"small": dict(T=256, d=128, f=256, E=4, k=2)} if options.quick else SHAPES
    rows = report(targets, shapes, with_train_step=not options.quick)
    table = markdown(rows)
    print(table)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "compile_report.md").write_text(table, encoding="utf-8")
        with open(options.output / "compile_report.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # jax reads them when it is imported, which has happened.
        command = [sys.executable, "-m", "benchmarks.compile_report", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as dump:
            dumped = {_DUMP: dump, "MOSAIC_GPU_DUMP_PTXAS": "1"}
            environment = {**os.environ, **ENVIRONMENT, **dumped}
            sys.exit(subprocess.run(command, env=environment).returncode)
    sys.exit(main())
