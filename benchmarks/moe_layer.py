"""One mixture-of-experts layer against the dense layer, our dispatchers against other libraries.

Every number is a ratio to the dense feed-forward layer of equal active FLOPs, timed in the same
rounds. The floor is the experts' own matrix products on rows that are already in place. On CPU the
blocks of Hugging Face transformers run too, where torch and transformers are installed; on an
accelerator the sizes are those of MegaBlocks, with TFLOP/s and the share of the peak.

Example:
  python -m benchmarks.moe_layer --shapes a,b --rounds 15 --output runs/benchmarks/moe_layer
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import command, layers, peers, report, shapes, timing, torch_setup
from benchmarks.growth import measure_growth
from moe_jax.train.memory import keep_freed_memory

MODULE = "benchmarks.moe_layer"
# TFLOP/s of dense bfloat16 products, as the vendors state them, by a part of the device's name
# (the H100 is the SXM one).
PEAKS = {
    "H100 80GB HBM3": 989,
    "H200": 989,
    "A100": 312,
    "TPU v5p": 459,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v6": 918,
    "TPU v5": 459,
}
COLUMNS = {
    "contender": "contender",
    "library": "library",
    "median_ms": "ms",
    "iqr_ms": "IQR",
    "ratio_to_dense": "x dense",
    "ratio_to_own_dense": "x own dense",
    "runs": "runs",
    "dropped_percent": "dropped %",
    "difference": "difference",
    "temp_mib": "temp MiB",
    "compile_s": "compile s",
    "skipped": "not measured because",
}
_TFLOPS_COLUMNS = {"tflops": "TFLOP/s", "peak_share": "of peak"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    record = report.record(MODULE, arguments)
    record["freed_memory_is_kept"] = not options.fresh_memory and keep_freed_memory()
    if with_peers := _with_peers():
        record["torch_threads"] = torch_setup.prepare()
    report.write_record(options.output / "machine.json", record)
    rows, sections = [], [f"# One layer\n\n{report.describe(record)}\n{_LEGEND}"]
    for shape, dtype, routing in _cases(options):
        inputs = shapes.make_inputs(shape, routing)
        for which in options.passes:
            new = _measure(shape, inputs, dtype, routing, which, options, with_peers)
            rows += new
            sections.append(_section(new, shape))
            print(sections[-1], flush=True)
            # After every case, so that a run that is stopped leaves what it has.
            report.write_csv(options.output / "moe_layer.csv", rows)
            text = "\n\n".join(sections) + "\n"
            (options.output / "moe_layer.md").write_text(text, encoding="utf-8")
    for dtype in options.dtypes:
        picture = options.output / f"moe_layer_{dtype}.png"
        report.draw_ratios(picture, [r for r in rows if r["dtype"] == dtype], f"One layer, {dtype}")
        print(f"wrote {picture}")
    if options.growth:
        how = dict(rounds=options.rounds, quick=options.quick)
        measure_growth(options.output, record, without=options.without, **how)
    return 0


_LEGEND = """
`x dense`: median over the rounds of time over the time of `dense`, the d -> f -> d GELU layer on
T*k rows. `x own dense`: the same over the dense layer of the same library and activation. SwiGLU
layers have the width at which their three matrices cost these FLOPs (up to 1 %), and all layers
with a router renormalise their gates if k > 1. `difference`: relative distance of the output from
that of our dropless layer with the same weights (bfloat16: torch rounds router logits too, so some
tokens go elsewhere). IQR: interquartile range of the milliseconds."""


def _parse(arguments):
    parser = command.parser(MODULE, __doc__, quick="a tiny layer, 2 rounds, to see that all runs")
    on_cpu = jax.default_backend() == "cpu"
    table = shapes.CPU_SHAPES if on_cpu else shapes.ACCELERATOR_SHAPES
    dtypes = ("float32", "bfloat16") if on_cpu else ("bfloat16",)
    passes = ("forward", "forward+backward")

    listed = functools.partial(command.add_list, parser)
    listed("--shapes", table, "; ".join(_size(shape) for shape in table.values()))
    listed("--dtypes", dtypes, "of tokens and experts")
    listed("--routings", shapes.ROUTINGS, "skewed: one expert is half of the first choices")
    listed("--passes", passes, "backward: gradient in tokens, router and all experts")
    parser.add_argument(
        "--rounds", type=command.positive, default=15, help="of all contenders (default: 15)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=20.0,
        help="seconds after which a contender misses the remaining rounds, though it runs three"
        " times unless one takes as long (default: 20)",
    )
    parser.add_argument(
        "--without",
        type=lambda text: [word for word in text.split(",") if word],
        default=[],
        metavar="A,B",
        help="leave out contenders whose name has one of these words, such as eager; dense layers"
        " stay where others are compared with them",
    )
    parser.add_argument(
        "--fresh-memory",
        action="store_true",
        help="let glibc map large buffers anew each time, its default; otherwise it keeps freed"
        " memory, for all contenders, as python -m moe_jax.train has it do",
    )
    parser.add_argument(
        "--growth", action="store_true", help="also time, memory and compile time as T, E, k grow"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        table, options.shapes, options.rounds = shapes.QUICK_SHAPES, list(shapes.QUICK_SHAPES), 2
    options.shapes = [table[name] for name in options.shapes]
    return options


def _size(shape):
    return (
        f"{shape.name}: T={shape.tokens} d={shape.width} f={shape.expert_width}"
        f" E={shape.experts} k={shape.k}"
    )


def _with_peers():
    if jax.default_backend() != "cpu":
        return False
    if missing := torch_setup.missing():
        print(f"without the blocks of transformers: not installed: {missing}", file=sys.stderr)
    return not missing


def _cases(options):
    return [
        (shape, dtype, routing)
        for shape in options.shapes
        for dtype in options.dtypes
        for routing in options.routings
    ]


def _measure(shape, inputs, dtype, routing, which, options, with_peers) -> list[dict[str, Any]]:
    """A row for each contender."""
    calls = 1 if jax.default_backend() == "cpu" else 10
    timed = layers.Timed(dtype, backward=which != "forward", calls=calls)
    contenders = layers.contenders(shape, inputs, timed)
    if with_peers:
        contenders += peers.contenders(shape, inputs, timed)
    _check_without(options.without, contenders)
    contenders = layers.without(options.without, contenders)
    results = timing.interleave(
        contenders,
        rounds=options.rounds,
        budget=options.budget,
        label=f"{shape.name} {dtype} {routing} {which}",
        look=layers.look,
    )
    case = {
        "shape": shape.name,
        "tokens": shape.tokens,
        "width": shape.width,
        "expert_width": shape.expert_width,
        "experts": shape.experts,
        "k": shape.k,
        "dtype": dtype,
        "routing": routing,
        "pass": which,
    }
    return [case | _row(contender, shape, timed, results) for contender in contenders]


def _check_without(words, contenders):
    for word in words:
        if not any(word in contender.name for contender in contenders):
            allowed = ", ".join(contender.name for contender in contenders)
            raise SystemExit(f"error: --without: got {word!r}; allowed: parts of {allowed}")


def _row(contender, shape, timed, results):
    result = results[contender.name]
    row = {
        "contender": contender.name,
        "library": contender.library,
        "used_width": shape.swiglu_width if contender.swiglu else shape.expert_width,
        "runs": len(result.seconds),
    }
    names = ["median_ms", "q1_ms", "q3_ms", "iqr_ms", "ratio_to_dense", "ratio_q1", "ratio_q3"]
    names += ["ratio_to_own_dense", "tflops", "peak_share", "temp_mib", "compile_s"]
    row |= dict.fromkeys([*names, "dropped_percent", "difference"])
    row["skipped"] = result.skipped
    if result.skipped:
        return row
    q1, median, q3 = timing.quartiles(1e3 * s for s in result.seconds.values())
    to_dense = timing.ratios(result, results[layers.DENSE])
    row |= dict(median_ms=median, q1_ms=q1, q3_ms=q3, iqr_ms=q3 - q1)
    row["ratio_q1"], row["ratio_to_dense"], row["ratio_q3"] = timing.quartiles(to_dense)
    own = timing.ratios(result, results[contender.own_dense])
    row["ratio_to_own_dense"] = timing.quartiles(own)[1]
    row |= _speed(contender, shape, timed, median / 1e3)
    program = result.program
    row["compile_s"] = program.compile_seconds
    row["temp_mib"] = None if program.temp_bytes is None else program.temp_bytes / 2**20
    y, dropped = result.output
    if dropped is not None:
        row["dropped_percent"] = 100 * dropped / shape.assignments
    reference = results.get(contender.same_as)
    if reference and reference.output and contender.same_as != contender.name:
        expected = reference.output[0]
        row["difference"] = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    return row


def _speed(contender, shape, timed, seconds):
    """TFLOP/s of the useful work, and its share of the device's peak where that is known."""
    flops = shape.flops
    if contender.swiglu:
        flops = 6 * shape.assignments * shape.width * shape.swiglu_width
    tflops = flops * (3 if timed.backward else 1) / seconds / 1e12
    kind = jax.devices()[0].device_kind
    peak = next((peak for name, peak in PEAKS.items() if name in kind), None)
    return {"tflops": tflops, "peak_share": tflops / peak if peak else None}


def _section(rows, shape):
    row = rows[0]
    columns = dict(COLUMNS)
    if jax.default_backend() != "cpu":
        columns = columns | _TFLOPS_COLUMNS
    if not any(row["skipped"] for row in rows):
        del columns["skipped"]
    title = f"## {_size(shape)}, {row['dtype']}, {row['routing']}, {row['pass']}"
    return f"{title}\n\n{report.markdown(rows, columns)}"


if __name__ == "__main__":
    sys.exit(main())
