"""What the compilers for accelerators say of a layer and of a train step, with no accelerator.

Every program is compiled by the real compiler of its target, and what that reports is written
down: floating-point operations and bytes (TPU), temporary memory, collectives, and of our GPU
kernels the most registers of a thread and the bytes spilled. The operations inside a kernel are as
the kernel declares them, useful work: what tiles with rows of two experts cost more is not there.
The compilers: pip install -e '.[compile,kernels]'. Every row is written as it is done, and a run
that was stopped goes on where it was.

Axis legend: T tokens, d width, f expert width, E experts, k choices.

Example:
  python -m benchmarks.compile_report --targets v5p,h100 --output runs/benchmarks/compile_report
"""

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command, report
from moe_jax.kernels.targets import ENVIRONMENT, TARGETS

MODULE = "benchmarks.compile_report"
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
COLUMNS = {
    "program": "program",
    "target": "target",
    "backend": "backend",
    "jax": "jax",
    "gflop": "GFLOP",
    "flops_over_dense": "x dense",
    "gbytes": "GB moved",
    "temporary_mb": "temporary MB",
    "temporary_over_dense": "x dense",
    "collectives": "collectives",
    "registers": "registers",
    "spill_bytes": "spilled bytes",
    "compile_seconds": "compile s",
    "note": "note",
}


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


def registers() -> dict:
    """What ptxas said of the kernels compiled since the last call: registers and spilled bytes."""
    if _DUMP not in os.environ:
        return {}
    paths = sorted(Path(os.environ[_DUMP]).iterdir())
    texts = [path.read_text(encoding="utf-8") for path in paths if path.suffix == ".ptxas"]
    for path in paths:
        path.unlink()
    used = [int(n) for text in texts for n in re.findall(r"Used (\d+) registers", text)]
    spilled = [int(n) for text in texts for n in re.findall(r"(\d+) bytes spill", text)]
    return dict(registers=max(used), spill_bytes=sum(spilled)) if used else {}


def measure(target: str, program: str, backend: str, function, arguments, dense: dict) -> dict:
    """One row of the report; ``dense`` is the row to compare with, {} for none."""
    import jax

    from moe_jax.kernels.targets import as_default_device, compile_for, device_of

    row = dict.fromkeys(COLUMNS) | dict(program=program, target=target, backend=backend)
    row["jax"] = jax.__version__
    start = time.perf_counter()
    try:
        with as_default_device(device_of(target)):
            compiled = compile_for(target, function, *arguments)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        registers()  # of the kernels before the one that failed: not the next program's
        return row | dict(note=str(error).strip().splitlines()[0][:120])
    row |= registers() | dict(compile_seconds=time.perf_counter() - start)
    row["temporary_mb"] = compiled.memory_analysis().temp_size_in_bytes / 1e6
    costs = compiled.cost_analysis()
    if costs:  # the GPU compiler gives none
        row |= dict(gflop=costs["flops"] / 1e9, gbytes=costs["bytes accessed"] / 1e9)
    found = re.findall(rf"= \S+ ({'|'.join(_COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    row["collectives"] = len(found)
    if dense.get("gflop") and row["gflop"]:
        row["flops_over_dense"] = row["gflop"] / dense["gflop"]
    if dense.get("temporary_mb"):
        row["temporary_over_dense"] = row["temporary_mb"] / dense["temporary_mb"]
    return row


def measure_all(targets, shapes, done: dict, *, with_train_step: bool):
    """Compiles everything for every target; yields each row, those that are ``done`` as they are.

    Args:
      targets: names.
      shapes: sizes of layers, by name.
      done: rows of an earlier run, as ``read_rows`` gives them. What failed then is tried again,
        and so is what another jax compiled.
      with_train_step: of the demo.
    """
    import jax

    for target in targets:
        dense = {}
        work = list(programs(target, shapes)) + (list(train_steps()) if with_train_step else [])
        for program, backend, function, arguments in work:
            row = done.get((program, target, backend))
            if row is None or row["note"] or row["jax"] != jax.__version__:
                print(f"{target}: {program}, {backend} ...", end=" ", flush=True)
                against = dense.get(program, {})
                row = measure(target, program, backend, function, arguments, against)
                print(row["note"] or f"{row['compile_seconds']:.1f} s", flush=True)
            if backend == "dense":
                dense[program] = row
            yield row


def read_rows(path: Path) -> dict:
    """The rows of an earlier run, by (program, target, backend); none if there was none."""
    if not path.exists():
        return {}
    words = ("program", "target", "backend", "jax", "note")
    rows = {}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {name: (text or None) for name, text in line.items()}
            row |= {n: json.loads(t) for n, t in row.items() if n not in words and t}
            rows[row["program"], row["target"], row["backend"]] = row
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = command.parser(MODULE, __doc__, quick="one small layer, no train step")
    command.add_list(parser, "--targets", TARGETS, "what to compile for")
    parser.add_argument("--anew", action="store_true", help="compile also what stands in --output")
    options = parser.parse_args(arguments)
    if _DUMP not in os.environ or any(os.environ.get(n) != v for n, v in ENVIRONMENT.items()):
        return _run_again(sys.argv[1:] if arguments is None else arguments)
    shapes = {"small": dict(T=256, d=128, f=256, E=4, k=2)} if options.quick else SHAPES
    options.output.mkdir(parents=True, exist_ok=True)
    record = report.record(MODULE, arguments)
    report.write_record(options.output / "machine.json", record)
    path = options.output / "compile_report.csv"
    rows = read_rows(path)
    done = {} if options.anew else dict(rows)
    for row in measure_all(options.targets, shapes, done, with_train_step=not options.quick):
        rows[row["program"], row["target"], row["backend"]] = row
        report.write_csv(path, list(rows.values()))
    table = report.markdown(list(rows.values()), COLUMNS)
    text = f"# Compiled\n\n{report.describe(record)}\n\n{table}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _run_again(arguments):
    """In a process of the right environment: jax has read that of this one, when imported."""
    with tempfile.TemporaryDirectory() as dump:
        dumped = {_DUMP: dump, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        again = [sys.executable, "-m", MODULE, *arguments]
        return subprocess.run(again, env={**os.environ, **ENVIRONMENT, **dumped}).returncode


if __name__ == "__main__":
    sys.exit(main())
