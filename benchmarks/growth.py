"""How time, temporary memory and compile time of one layer grow with T, E and k.

Axis legend: T tokens, E experts, k choices per token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import layers, report, shapes, timing

_COLUMNS = {
    "series": "series",
    "tokens": "T",
    "experts": "E",
    "k": "k",
    "contender": "contender",
    "median_ms": "ms",
    "iqr_ms": "IQR",
    "ratio_to_dense": "x dense",
    "temp_mib": "temp MiB",
    "compile_s": "compile s",
}


def measure_growth(
    output: Path,
    record: Mapping[str, Any],
    *,
    rounds: int,
    quick: bool,
    without: Sequence[str] = (),
) -> None:
    """Forward and backward in float32, uniform routing; writes growth.csv, .md and .png."""
    rows = []
    for series, points in shapes.growth_shapes(quick).items():
        for shape in points:
            rows += _measure(series, shape, rounds, without)
    report.write_csv(output / "growth.csv", rows)
    report.draw_growth(output / "growth.png", rows)
    table = report.markdown(rows, _COLUMNS)
    head = f"# Growth\n\n{report.describe(record)}\n\nForward and backward,"
    text = f"{head} float32, uniform routing, d={shape.width}, f={shape.expert_width}.\n\n{table}\n"
    (output / "growth.md").write_text(text, encoding="utf-8")
    print(text)


def _measure(series, shape, rounds, without):
    timed = layers.Timed("float32", backward=True)
    inputs = shapes.make_inputs(shape, "uniform")
    contenders = [c for c in layers.contenders(shape, inputs, timed) if not c.swiglu]
    contenders = layers.without(without, contenders)
    results = timing.interleave(contenders, rounds=rounds, budget=20, label=f"growth {shape.name}")
    rows = []
    for name, result in results.items():
        row = {"series": series, "tokens": shape.tokens, "experts": shape.experts, "k": shape.k}
        row |= {"contender": name, "runs": len(result.seconds)}
        row |= dict.fromkeys(["median_ms", "iqr_ms", "ratio_to_dense", "temp_mib", "compile_s"])
        row["skipped"] = result.skipped
        if not result.skipped:
            q1, row["median_ms"], q3 = timing.quartiles(1e3 * s for s in result.seconds.values())
            row["iqr_ms"] = q3 - q1
            to_dense = timing.ratios(result, results[layers.DENSE])
            row["ratio_to_dense"] = timing.quartiles(to_dense)[1]
            row["temp_mib"] = result.program.temp_bytes / 2**20
            row["compile_s"] = result.program.compile_seconds
        rows.append(row)
    return rows
