"""Results as CSV, markdown and a picture, with the machine and the command they come from."""

import csv
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.torch_setup import cores

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, told apart under the common forms of colour blindness.
_COLOURS = {"jax": "#0072B2", "torch": "#E69F00", "transformers": "#D55E00"}
_SHADES = (1.0, 0.5)  # of the routings
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers", "tokamax")


def record(module: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """The command, and what its numbers depend on beside the program."""
    device = jax.devices()[0]
    return {
        "command": _command(module, arguments),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command(module: str, arguments: Sequence[str] | None) -> str:
    """The command line; without arguments that of this process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", module, *arguments])


def write_csv(path: Path, rows: Rows) -> None:
    """All rows, with the columns of the first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """As JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def markdown(rows: Rows, columns: Mapping[str, str]) -> str:
    """A table of some columns: {key of the row: heading}."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(shown(row[key]) for key in columns) + " |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A number with three digits that count."""
    if value is None or value == "":
        return "-"
    if not isinstance(value, float):
        return str(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def describe(record: Mapping[str, Any]) -> str:
    """The record in two lines of markdown."""
    rest = {name: value for name, value in record.items() if name != "command"}
    parts = [f"{name} {value}" for name, value in rest.items() if value is not None]
    return f"`{record['command']}`\n\n{', '.join(parts)}"


def draw_ratios(path: Path, rows: Rows, title: str) -> None:
    """Bars of the ratio to the dense layer: a panel for each shape and pass, a bar a contender.

    Args:
      path: of the PNG.
      rows: of one dtype; with "shape", "pass", "routing", "contender", "library",
        "ratio_to_dense", "ratio_q1", "ratio_q3".
      title: of the figure.
    """
    rows = [row for row in rows if not row["skipped"]]
    shapes, passes = _unique(rows, "shape"), _unique(rows, "pass")
    names = {
        shape: _unique([r for r in rows if r["shape"] == shape], "contender") for shape in shapes
    }
    heights = [0.34 * len(names[shape]) + 0.9 for shape in shapes]
    figure = Figure((6.5 * len(passes), sum(heights) + 0.8), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(
        len(shapes), len(passes), squeeze=False, height_ratios=heights, sharex=True
    )
    for i, shape in enumerate(shapes):
        for j, which in enumerate(passes):
            inside = [r for r in rows if r["shape"] == shape and r["pass"] == which]
            _draw_panel(panels[i, j], inside, names[shape], first=j == 0)
            panels[i, j].set_title(f"{shape}, {which}", loc="left", fontsize=10)
    routings = _unique(rows, "routing")
    shades = [Patch(color="#555555", alpha=_SHADES[i], label=r) for i, r in enumerate(routings)]
    panels[0, -1].legend(handles=shades, loc="lower right", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("time over the dense layer of equal active FLOPs (log)")
    figure.savefig(path, dpi=130)


def _draw_panel(panel, rows, names, first):
    routings = _unique(rows, "routing")
    height = 0.8 / len(routings)
    for row in rows:
        which = routings.index(row["routing"])
        y = names.index(row["contender"]) + (which - (len(routings) - 1) / 2) * height
        ratio = row["ratio_to_dense"]
        spread = [[ratio - row["ratio_q1"]], [row["ratio_q3"] - ratio]]
        style = {"color": _COLOURS[row["library"]], "alpha": _SHADES[which]}
        panel.barh(y, ratio, height, xerr=spread, error_kw={"elinewidth": 0.8}, **style)
        panel.annotate(
            f" {shown(ratio)}", (row["ratio_q3"], y), va="center", fontsize=7, clip_on=False
        )
    panel.axvline(1.0, color="#333333", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yticks(range(len(names)), names if first else [""] * len(names), fontsize=8)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.1)


def draw_growth(path: Path, rows: Rows) -> None:
    """Lines over the growing size: time, temporary memory, compile time; a row for each series."""
    quantities = {"median_ms": "ms", "temp_mib": "temporary MiB", "compile_s": "compile s"}
    all_series = _unique(rows, "series")
    figure = Figure((4 * len(quantities), 2.8 * len(all_series)), layout="constrained")
    panels = figure.subplots(len(all_series), len(quantities), squeeze=False)
    for i, series in enumerate(all_series):
        for j, (key, label) in enumerate(quantities.items()):
            inside = [r for r in rows if r["series"] == series and not r["skipped"]]
            for name in _unique(inside, "contender"):
                line = [r for r in inside if r["contender"] == name]
                panels[i, j].plot(
                    [r[series] for r in line], [r[key] for r in line], "o-", label=name
                )
            panels[i, j].set(xscale="log", yscale="log", xlabel=series, ylabel=label)
            panels[i, j].spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _unique(rows, key):
    """The values of a column in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))
