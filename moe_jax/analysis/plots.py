"""Pictures of a training run, each with the numbers behind it.

Every function takes plain rows or arrays, writes ``<name>.png`` and ``<name>.csv`` into a directory
(made if missing) and returns both paths. Figures are built without pyplot: no global state, no
display, nothing to close.

Axis legend: L mixture-of-experts layers, E experts.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, told apart under the common forms of colour blindness; without their
# yellow, which is too faint for a line on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":")
_INK = "#222222"
_FAINT_INK = "#5A5A5A"
_DOTTED = {"color": _FAINT_INK, "linestyle": (0, (5, 3)), "linewidth": 1.1, "zorder": 1}
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "text.parse_math": False,  # a name with a $ in it is a name
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "grid.color": "#E6E6E6",
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
}
_SPLITS = ("train", "validation")


class Picture(NamedTuple):
    """Where a picture and the numbers behind it were written."""

    png: Path
    csv: Path


class _Panel(NamedTuple):
    title: str
    mean: str
    worst: str | None = None
    is_entropy: bool = False


_PANELS = (
    _Panel("Dropped fraction of assignments", "dropped_fraction_mean", "dropped_fraction_max"),
    _Panel("Load CV (balanced: 0)", "load_cv_mean", "load_cv_max"),
    _Panel("Load entropy (nats)", "load_entropy_mean", "load_entropy_min", is_entropy=True),
    _Panel("Router entropy per token (nats)", "router_entropy_mean", is_entropy=True),
)


def loss_curves(
    runs: Mapping[str, Rows],
    directory: str | Path,
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "Cross-entropy: training batches (faint), held-out text (marked)",
    name: str = "loss_curves",
) -> Picture:
    """Draws training and validation cross-entropy against steps, one colour a run.

    Values that are not finite leave a gap in their line and are counted in the legend. A training
    spike of more than three times the height of everything else leaves the picture at the top.

    Args:
      runs: run name -> metric rows as in metrics.jsonl. Read from a row: ``step``, ``split``
        ("train" or "validation") and ``cross_entropy`` in nats per token; rows without are skipped.
      directory: where the files go.
      baselines: name -> cross-entropy in nats per token, as dashed lines (unigram, bigram, ...).
      title: the title of the picture.
      name: file name without extension.

    Raises:
      ValueError: no runs, a run without a finite cross-entropy, or a baseline that is not finite.
    """
    if not runs:
        raise ValueError("loss_curves: runs is empty; expected at least one run with metric rows")
    baselines = dict(baselines or {})
    for label, value in baselines.items():
        if not math.isfinite(value):
            raise ValueError(f"loss_curves: baseline {label!r} is {value}; expected finite nats")
    curves = {}
    for run, rows in runs.items():
        curves[run] = {split: _series(rows, split, "cross_entropy") for split in _SPLITS}
        if not any(np.isfinite(values).any() for _, values in curves[run].values()):
            raise ValueError(
                f"loss_curves: run {run!r} has no row with a finite cross_entropy; expected rows "
                "with step, split ('train' or 'validation') and cross_entropy"
            )

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.4, 4.4 + 0.2 * math.ceil(len(runs) / 3)), layout="constrained")
        axes = figure.subplots()
        lines = [_draw_run(axes, splits, index) for index, splits in enumerate(curves.values())]
        axes.set_ylim(_loss_limits(curves, baselines))
        _draw_baselines(axes, baselines)
        axes.set_title(title)
        axes.set_ylabel("cross-entropy (nats per token)")
        axes.grid(axis="y")
        _step_axis(axes)
        _perplexity_axis(axes)
        names = [_legend_name(run, splits) for run, splits in curves.items()]
        columns = min(len(runs), 3)
        figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)
        png = _save(figure, directory, name)

    table = [
        (run, split, int(step), value, _exp(value))
        for run, splits in curves.items()
        for split, (steps, values) in splits.items()
        for step, value in zip(steps, values, strict=True)
    ]
    table += [(label, "baseline", "", value, _exp(value)) for label, value in baselines.items()]
    columns = ("run", "split", "step", "cross_entropy", "perplexity")
    return Picture(png, _write_csv(directory, name, columns, table))


def load_heatmap(
    load: Any,
    directory: str | Path,
    *,
    sort: bool = False,
    layers: Sequence[Any] | None = None,
    subtitle: str = "",
    name: str = "expert_load",
) -> Picture:
    """Draws each expert's share of its layer's assignments, coloured by how far it is from 1/E.

    The neutral colour is the uniform share 1/E, and the scale is logarithmic: twice and half of it
    are equally strong. An expert without any assignment is crossed out, a layer without any grey.

    Args:
      load: int[L, E], assignments that each expert received.
      directory: where the files go.
      sort: order the experts of each layer by load, heaviest first. A column then is a rank and not
        one expert, which loses nothing: experts of two layers have only the index in common.
      layers: L labels; the layers' indices by default.
      subtitle: what was counted, such as "validation, step 2000".
      name: file name without extension.

    Raises:
      ValueError: load is not a non-empty [L, E] array of finite numbers >= 0 with some assignment,
        or layers has another length.
    """
    load = np.asarray(load)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"load_heatmap: load has shape {load.shape}; expected [L, E], both >= 1")
    if not np.isfinite(load).all() or (load < 0).any() or not load.any():
        raise ValueError("load_heatmap: load must be finite, >= 0 and not zero everywhere")
    num_layers, num_experts = load.shape
    labels = [str(label) for label in (range(num_layers) if layers is None else layers)]
    if len(labels) != num_layers:
        raise ValueError(f"load_heatmap: {len(labels)} layers; expected {num_layers}, as in load")

    total = load.sum(axis=1)
    share = load / np.where(total == 0, 1, total)[:, None]
    order = np.argsort(-load, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    with matplotlib.rc_context(_STYLE):
        shown = np.take_along_axis(share, order, axis=1) if sort else share
        png = _save(_draw_heatmap(shown, total > 0, labels, sort, subtitle), directory, name)
    table = [
        (labels[i], j, rank[i, j], load[i, j], share[i, j], share[i, j] * num_experts)
        for i, j in np.ndindex(load.shape)
    ]
    columns = ("layer", "expert", "rank", "load", "share", "share_over_uniform")
    return Picture(png, _write_csv(directory, name, columns, table))


def routing_over_time(
    rows: Rows,
    directory: str | Path,
    *,
    num_experts: int | None = None,
    title: str = "Routing over training",
    name: str = "routing_over_time",
) -> Picture:
    """Draws dropped fraction, load CV and both entropies against steps, one panel each.

    Lines and dots are means over the layers; the shade reaches from the line to the worst layer
    (the largest dropped fraction and load CV, the smallest load entropy).

    Args:
      rows: metric rows as in metrics.jsonl, of both splits. A panel without any value is left out.
      directory: where the files go.
      num_experts: E; if given, both entropies get a line at their limit ln E.
      title: the title of the picture.
      name: file name without extension.

    Raises:
      ValueError: no row has a finite routing scalar (as in the run of a dense model).
    """
    panels = [panel for panel in _PANELS if _any_finite(rows, panel.mean)]
    if not panels:
        expected = ", ".join(panel.mean for panel in _PANELS)
        raise ValueError(
            f"routing_over_time: none of the {len(rows)} rows has a finite routing scalar; "
            f"expected step, split and any of {expected} (a dense model has none)"
        )
    with matplotlib.rc_context(_STYLE):
        shape = (math.ceil(len(panels) / 2), min(len(panels), 2))
        size = (max(6.2, 4.4 * shape[1]), 0.9 + 2.4 * shape[0])
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(*shape, squeeze=False).ravel()
        for axes, panel, colour in zip(grid, panels, _COLOURS, strict=False):
            _draw_panel(axes, panel, rows, colour, num_experts)
            _step_axis(axes)
        for axes in grid[len(panels) :]:
            axes.remove()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        legend = "mean over layers; line: training, dots: held-out text"
        if any(_any_finite(rows, panel.worst) for panel in panels if panel.worst):
            legend += ", shade: to the worst layer"
        figure.supxlabel(legend, fontsize=9, color=_FAINT_INK)
        png = _save(figure, directory, name)

    fields = [field for panel in panels for field in (panel.mean, panel.worst)]
    fields = [field for field in fields if field and _any_finite(rows, field)]
    rows = [row for row in rows if any(field in row for field in fields)]
    last = {(row["step"], row["split"]): row for row in rows if row.get("split") in _SPLITS}
    table = [(*key, *(row.get(field, "") for field in fields)) for key, row in sorted(last.items())]
    return Picture(png, _write_csv(directory, name, ("step", "split", *fields), table))


def gate_panels(
    swept: Any,
    curves: Mapping[str, Any],
    directory: str | Path,
    *,
    moving: int,
    boundary: float,
    name: str = "gates",
) -> Picture:
    """A panel per router: the gates of a token's experts while one of its logits moves.

    Args:
      swept: float[n], the values of that logit.
      curves: the gates float[n, E] of every router, by the title of its panel.
      directory: where the picture goes.
      moving: the expert whose logit moves; its line is the thick one.
      boundary: the value at which that expert comes among the k best.
      name: of the files.

    Returns:
      Picture; the CSV has a row per router and value, with a column per expert.

    Raises:
      ValueError: there is no curve, or one of another shape than [n, E].
    """
    swept = np.asarray(swept, float)
    gates = {title: np.asarray(curve, float) for title, curve in curves.items()}
    if not gates:
        raise ValueError("curves: got none; allowed: at least one router")
    num_experts = next(iter(gates.values())).shape[-1]
    for title, curve in gates.items():
        if curve.shape != (len(swept), num_experts):
            allowed = f"{(len(swept), num_experts)}, points and experts"
            raise ValueError(f"curves[{title!r}]: got shape {curve.shape}; allowed: {allowed}")
    width = min(4, len(gates))
    height = math.ceil(len(gates) / width)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.1 * width + 0.6, 2.4 * height + 0.7), layout="constrained")
        grid = figure.subplots(height, width, sharex=True, squeeze=False).ravel()
        for axes, (title, curve) in zip(grid, gates.items(), strict=False):
            axes.axvline(boundary, **_DOTTED)
            for expert in range(num_experts):
                style = dict(color=_COLOURS[expert % len(_COLOURS)], label=f"expert {expert}")
                style["linewidth"] = 2.6 if expert == moving else 1.4
                # A jump is a gap in the line, not a slope.
                axes.plot(swept, _with_gaps(curve[:, expert]), **style)
            axes.set_title(title)
            axes.set_ylim(bottom=-0.03 * max(1.0, curve.max()))
            axes.grid(axis="y")
        for axes in grid[len(gates) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(gates) - width) : len(gates)]:
            axes.set_xlabel(f"logit of expert {moving}")
        for axes in grid[::width]:
            axes.set_ylabel("gate")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=num_experts, frameon=False)
        png = _save(figure, directory, name)
    table = [
        (title, value, *row)
        for title, curve in gates.items()
        for value, row in zip(swept, curve, strict=True)
    ]
    columns = ("router", "logit", *(f"expert_{expert}" for expert in range(num_experts)))
    return Picture(png, _write_csv(directory, name, columns, table))


def _with_gaps(values):
    """The values with NaN where they jump, by far more than a step of the line can explain."""
    steps = np.abs(np.diff(values))
    usual = max(np.median(steps), np.ptp(values) / len(values))
    broken = values.astype(float).copy()
    broken[1:][steps > 20 * usual] = np.nan
    return broken


def _series(rows, split, field):
    """Steps and values (float arrays) of one field of one split, in the order of the steps.

    A step that a run reached twice, before and after a restart, counts with its last row.
    """
    found = {
        row["step"]: np.nan if row[field] is None else float(row[field])
        for row in rows
        if row.get("split") == split and "step" in row and field in row
    }
    steps = sorted(found)
    return np.array(steps, float), np.array([found[step] for step in steps], float)


def _any_finite(rows, field):
    return any(np.isfinite(_series(rows, split, field)[1]).any() for split in _SPLITS)


def _finite(values):
    return np.where(np.isfinite(values), values, np.nan)


def _dot(values):
    """The marker of a thin line: one that is a single point would not show without."""
    return "o" if np.isfinite(values).sum() == 1 else None


def _draw_run(axes, splits, index):
    turn, place = divmod(index, len(_COLOURS))
    # Past the last colour the same ones come again with other markers and dashes.
    look = {"color": _COLOURS[place], "linestyle": _DASHES[turn % len(_DASHES)]}
    steps, values = splits["train"]
    axes.plot(steps, _finite(values), **look, alpha=0.4, linewidth=0.9, marker=_dot(values))
    held_steps, held = splits["validation"]
    (line,) = axes.plot(
        held_steps,
        _finite(held),
        **look,
        linewidth=1.8,
        marker=_MARKERS[(place + turn) % len(_MARKERS)],
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.7,
        markevery=max(1, math.ceil(len(held) / 25)),
    )
    return line


def _legend_name(run, splits):
    lost = sum(int((~np.isfinite(values)).sum()) for _, values in splits.values())
    return run if lost == 0 else f"{run} ({lost} values not finite)"


def _loss_limits(curves, baselines):
    train = np.concatenate([splits["train"][1] for splits in curves.values()])
    marked = np.concatenate([splits["validation"][1] for splits in curves.values()])
    train, marked = train[np.isfinite(train)], marked[np.isfinite(marked)]
    marked = [*marked, *baselines.values()]
    low, high = min([*train, *marked]), max([*train, *marked])
    if len(train):
        calm = max([*marked, np.quantile(train, 0.98, method="lower")])
        if high - low > 3 * (calm - low) > 0:
            high = calm
    margin = 0.06 * (high - low) or 0.05 * max(abs(high), 1.0)
    return low - margin, high + margin


def _draw_baselines(axes, baselines):
    low, high = axes.get_ylim()
    previous = -math.inf
    for label, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(value, **_DOTTED)
        height = max(value, previous + 0.05 * (high - low))  # labels of close lines are stacked
        _note(axes, f"{label} {value:.2f}", height)
        previous = height


def _note(axes, text, height):
    """Writes above a horizontal line, at its right end."""
    axes.annotate(
        text,
        (1.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(-3, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color=_FAINT_INK,
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=4,
    )


def _perplexity_axis(axes):
    """A second scale at the right: perplexity = exp(cross-entropy), at round numbers."""
    low, high = axes.get_ylim()
    if high > 30:  # a diverged run: perplexities past 1e13 tell nothing
        return
    if high - low < math.log(6):
        ticks = MaxNLocator(nbins=6).tick_values(math.exp(low), math.exp(high))
    else:
        powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)))
        digits = (1, 2, 5) if high - low < math.log(1e4) else (1,)
        ticks = np.array([digit * 10.0**power for power in powers for digit in digits])
    ticks = [tick for tick in ticks if math.exp(low) <= tick <= math.exp(high)]
    right = axes.twinx()
    right.set_ylim(low, high)
    right.set_yticks(np.log(ticks), [f"{tick:,.6g}" for tick in ticks])
    right.set_ylabel("perplexity")
    right.spines["right"].set_visible(True)


def _step_axis(axes):
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _draw_panel(axes, panel, rows, colour, num_experts):
    steps, mean = _series(rows, "train", panel.mean)
    held_steps, held = _series(rows, "validation", panel.mean)
    worst_steps, worst = _series(rows, "train", panel.worst) if panel.worst else ((), np.zeros(0))
    axes.plot(steps, _finite(mean), color=colour, linewidth=1.5, marker=_dot(mean), markersize=4)
    if np.array_equal(worst_steps, steps):
        shade = {"color": colour, "alpha": 0.18, "linewidth": 0}
        axes.fill_between(steps, _finite(mean), _finite(worst), **shade)
    dots = {"color": colour, "markersize": 5.5, "markeredgecolor": "white", "clip_on": False}
    if len(held):  # the layout breaks down over an empty line that is not clipped
        axes.plot(held_steps, _finite(held), "o", **dots, zorder=3)
    values = np.concatenate([mean, held, worst])
    values = values[np.isfinite(values)]
    low, high = 0.0, 1.1 * values.max() or 0.1
    if panel.is_entropy and num_experts is not None and num_experts > 1:
        limit = math.log(num_experts)
        axes.axhline(limit, **_DOTTED)
        _note(axes, f"ln {num_experts} = {limit:.2f}", limit)
        high = max(high, limit)
    if panel.is_entropy and values.min() > high / 2:  # near the limit, where 0 says little
        low = values.min() - 0.3 * (high - values.min())
    axes.set_ylim(low, high + 0.15 * (high - low) if panel.is_entropy else high)
    axes.set_title(panel.title, fontsize=10, fontweight="normal")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="y")


def _draw_heatmap(share, used, labels, sort, subtitle):
    """A figure of share f[L, E]; used bool[L] marks the layers with any assignment."""
    num_layers, num_experts = share.shape
    width = min(0.62, max(0.14, 9.5 / num_experts))  # of a cell, in inches
    height = min(0.36, max(0.16, 8.0 / num_layers))
    readable = width >= 0.42 and height >= 0.19
    size = (max(5.6, width * num_experts + 0.8), height * num_layers + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        distance = np.where(used[:, None], np.log2(share * num_experts), np.nan)  # in doublings
    # From half..twice to an eighth..eight times uniform; the same reach on both sides.
    reach = int(np.clip(np.ceil(np.abs(distance[np.isfinite(distance)]).max()), 1, 3))
    colours = ScalarMappable(
        Normalize(-reach, reach), matplotlib.colormaps["RdBu_r"].with_extremes(bad="#DDDDDD")
    )
    axes.pcolormesh(
        np.clip(distance, -reach, reach),
        cmap=colours.cmap,
        norm=colours.norm,
        edgecolors="white",
        linewidth=1.0 if min(width, height) >= 0.25 else 0.4,
    )
    for i, j in np.ndindex(share.shape):
        if used[i] and share[i, j] == 0:
            axes.plot(j + 0.5, i + 0.5, "x", color="white", markersize=5, markeredgewidth=1.4)
        elif used[i] and readable:
            ink = "white" if abs(distance[i, j]) > 0.65 * reach else _INK
            text = f"{100 * share[i, j]:.1f}".replace("100.0", "100")
            axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    _label_cells(axes, labels, num_experts, sort)
    title = f"Share of each layer's assignments by {'rank of the expert' if sort else 'expert'}"
    axes.set_title(title + (" (%)" if readable else ""), pad=22)
    uniform = f"uniform share: 1/{num_experts} = {100 / num_experts:.3g} %"
    axes.annotate(
        "; ".join(filter(None, [subtitle, uniform])),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 7),
        textcoords="offset points",
        fontsize=9,
        color=_FAINT_INK,
    )
    _ratio_bar(figure, axes, colours, distance)
    return figure


def _label_cells(axes, labels, num_experts, sort):
    axes.invert_yaxis()
    axes.set_xlabel("rank by load within the layer" if sort else "expert")
    axes.set_ylabel("layer")
    every = math.ceil(num_experts / 32)
    axes.set_xticks(np.arange(0, num_experts, every) + 0.5, range(0, num_experts, every))
    every = math.ceil(len(labels) / 48)
    axes.set_yticks(np.arange(0, len(labels), every) + 0.5, labels[::every])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _ratio_bar(figure, axes, colours, distance):
    width, height = figure.get_size_inches()
    reach = int(colours.norm.vmax)
    ends = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}
    bar = figure.colorbar(
        colours,
        ax=axes,
        location="bottom",
        shrink=4.5 / width,  # 4.5 inches by 0.13, whatever the size of the figure
        aspect=4.5 / 0.13,
        fraction=0.2 / height,
        pad=0.08 / height,
        extend=ends[bool((distance < -reach).any()), bool((distance > reach).any())],
    )
    doublings = range(-reach, reach + 1)
    names = [f"1/{2**-d}" if d < 0 else "uniform" if d == 0 else f"{2**d}×" for d in doublings]
    bar.set_ticks(doublings, labels=names)
    bar.set_label("share over the uniform share (crossed out: no assignment)", fontsize=9)
    bar.outline.set_visible(False)


def _exp(value):
    return math.exp(value) if value < 700 else math.inf


def _save(figure, directory, name):
    path = Path(directory) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _write_csv(directory, name, columns, rows):
    path = Path(directory) / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    return path
