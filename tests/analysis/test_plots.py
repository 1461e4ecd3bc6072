"""Pictures: the numbers behind them are right, and no size or odd row breaks the drawing."""

import csv
import math

import numpy as np
import pytest
from matplotlib.image import imread

from moe_jax.analysis import plots

# A layout that collapses, a missing glyph or a division by zero is a warning in matplotlib.
pytestmark = [
    pytest.mark.filterwarnings("error::UserWarning"),
    pytest.mark.filterwarnings("error::RuntimeWarning"),
]


def rows_of(values, split="train", **more):
    return [
        {"step": 10 * (i + 1), "split": split, "cross_entropy": value} | more
        for i, value in enumerate(values)
    ]


def table(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def check_drawn(picture):
    image = imread(picture.png)
    assert min(image.shape[:2]) > 250
    assert image[..., :3].std() > 0.02  # not an empty page
    assert len(table(picture.csv)) >= 1


def test_loss_curves_csv(tmp_path):
    runs = {
        "dense": rows_of([2.0, 1.0]) + rows_of([math.log(8)], "validation"),
        "moe": [{"step": 5, "split": "test", "cross_entropy": 9.0}, *rows_of([1.5])],
    }
    picture = plots.loss_curves(runs, tmp_path / "new" / "folder", baselines={"unigram": 0.0})
    check_drawn(picture)
    assert picture.png.parent == tmp_path / "new" / "folder"
    rows = table(picture.csv)
    seen = [(row["run"], row["split"], row["step"]) for row in rows]
    assert seen == [
        ("dense", "train", "10"),
        ("dense", "train", "20"),
        ("dense", "validation", "10"),
        ("moe", "train", "10"),
        ("unigram", "baseline", ""),
    ]
    perplexity = [float(row["perplexity"]) for row in rows]
    np.testing.assert_allclose(perplexity, [math.e**2, math.e, 8, math.e**1.5, 1], rtol=1e-12)


def test_loss_curves_of_a_restarted_run_counts_each_step_once(tmp_path):
    runs = {"run": [*rows_of([3.0, 2.0]), *rows_of([3.5])]}
    rows = table(plots.loss_curves(runs, tmp_path).csv)
    assert [(row["step"], row["cross_entropy"]) for row in rows] == [("10", "3.5"), ("20", "2.0")]


@pytest.mark.parametrize(
    "values",
    [[2.5], [2.5, 2.5, 2.5], [800.0, 900.0], [3.0, math.nan, None, math.inf, 2.0], [1e9, 2.0, 1.0]],
    ids=["one", "flat", "huge", "not finite", "spike"],
)
def test_loss_curves_of_odd_values(tmp_path, values):
    check_drawn(plots.loss_curves({"_odd $a$": rows_of(values)}, tmp_path))
    check_drawn(plots.loss_curves({"odd": rows_of(values, "validation")}, tmp_path))


def test_loss_curves_of_many_runs_and_rows(tmp_path):
    runs = {f"run {i}": rows_of(np.linspace(5, 1 + i / 10, 2000)) for i in range(16)}
    check_drawn(plots.loss_curves(runs, tmp_path, baselines={"unigram": 3.0, "bigram": 2.99}))


def test_spike_leaves_the_picture_but_an_ordinary_start_does_not():
    def limits(values):
        train, nothing = np.array(values), np.zeros(0)
        return plots._loss_limits({"run": {"train": (0, train), "validation": (0, nothing)}}, {})

    descent = list(np.linspace(6.0, 2.0, 100))
    assert limits(descent)[1] > 6.0
    assert 5.5 < limits([*descent, 1e6])[1] < 6.5


@pytest.mark.parametrize(
    "runs, baselines, message",
    [
        ({}, {}, "runs is empty"),
        ({"a": []}, {}, "run 'a' has no row with a finite cross_entropy"),
        ({"a": rows_of([math.nan])}, {}, "run 'a'"),
        ({"a": rows_of([1.0], split="test")}, {}, "'train' or 'validation'"),
        ({"a": rows_of([1.0])}, {"unigram": math.nan}, "baseline 'unigram' is nan"),
    ],
)
def test_loss_curves_errors(tmp_path, runs, baselines, message):
    with pytest.raises(ValueError, match=message):
        plots.loss_curves(runs, tmp_path, baselines=baselines)
    assert not list(tmp_path.iterdir())


def test_load_heatmap_csv(tmp_path):
    # Layer 7: shares 1/8, 5/8, 0, 2/8 of 8 assignments, so 0.5, 2.5, 0 and 1 times 1/E = 1/4.
    picture = plots.load_heatmap([[1, 5, 0, 2], [3, 3, 3, 3]], tmp_path, layers=["7", "9"])
    check_drawn(picture)
    rows = table(picture.csv)
    assert [row["layer"] for row in rows] == ["7"] * 4 + ["9"] * 4
    assert [row["expert"] for row in rows] == list("01230123")
    assert [row["rank"] for row in rows] == list("20310123")
    assert [row["load"] for row in rows] == list("15023333")
    assert [float(row["share"]) for row in rows] == [1 / 8, 5 / 8, 0, 2 / 8] + [1 / 4] * 4
    assert [float(row["share_over_uniform"]) for row in rows] == [0.5, 2.5, 0, 1] + [1] * 4


def test_load_heatmap_sorted_is_the_same_table_and_another_picture(tmp_path):
    load = [[1, 5, 0, 2]]
    plain = plots.load_heatmap(load, tmp_path, name="plain")
    ordered = plots.load_heatmap(load, tmp_path, name="ordered", sort=True)
    assert plain.csv.read_text() == ordered.csv.read_text()
    assert plain.png.read_bytes() != ordered.png.read_bytes()


@pytest.mark.parametrize("num_layers, num_experts", [(1, 1), (1, 64), (48, 1), (48, 64), (12, 16)])
def test_load_heatmap_sizes(tmp_path, num_layers, num_experts):
    load = np.random.default_rng(0).integers(0, 40, (num_layers, num_experts)) ** 2
    load[0, 0] = 1
    if num_layers > 1:
        load[1] = 0  # a layer that saw no token
    picture = plots.load_heatmap(load, tmp_path, subtitle="validation")
    check_drawn(picture)
    shares = np.array([float(row["share"]) for row in table(picture.csv)])
    assert np.isfinite(shares).all()
    expected = (load.sum(axis=1) > 0).astype(float)
    np.testing.assert_allclose(shares.reshape(load.shape).sum(axis=1), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "load, layers, message",
    [
        (np.zeros((0, 4)), None, r"shape \(0, 4\)"),
        (np.ones(4), None, r"expected \[L, E\]"),
        (np.zeros((2, 4)), None, "not zero everywhere"),
        ([[1, -1]], None, ">= 0"),
        ([[1.0, math.nan]], None, "finite"),
        ([[1, 2]], ["a", "b"], "2 layers; expected 1"),
    ],
)
def test_load_heatmap_errors(tmp_path, load, layers, message):
    with pytest.raises(ValueError, match=message):
        plots.load_heatmap(load, tmp_path, layers=layers)


def routing_rows(count, split="train", **replaced):
    rows = []
    for i in range(count):
        shared = {"load_entropy_mean": 1.9, "load_entropy_min": 1.5, "router_entropy_mean": 1.1}
        worst = {"dropped_fraction_max": 0.3, "load_cv_max": 0.9}
        mean = {"dropped_fraction_mean": 0.1 / (i + 1), "load_cv_mean": 0.4}
        row = {"step": 10 * i, "split": split, "loss": 2.0, **shared, **worst, **mean} | replaced
        rows.append({name: value for name, value in row.items() if value != "absent"})
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        routing_rows(1),
        routing_rows(1, "validation"),
        routing_rows(40) + routing_rows(4, "validation"),
        routing_rows(5, dropped_fraction_mean=0.0, dropped_fraction_max=0.0),
        routing_rows(5, load_entropy_mean=0.0, load_entropy_min=0.0),
        routing_rows(5, load_cv_mean=math.nan, load_cv_max=math.inf),
        routing_rows(5, dropped_fraction_mean="absent", router_entropy_mean="absent"),
        routing_rows(5, load_cv_max="absent", load_entropy_mean="absent"),
    ],
    ids=["one", "held-out", "many", "dropless", "collapsed", "not finite", "two", "no worst"],
)
def test_routing_over_time_of_odd_rows(tmp_path, rows):
    check_drawn(plots.routing_over_time(rows, tmp_path, num_experts=8 if len(rows) > 1 else None))


def test_routing_over_time_csv(tmp_path):
    rows = [{"step": 1, "split": "train", "loss": 1.0}, *routing_rows(2, load_cv_max="absent")]
    found = table(plots.routing_over_time(rows, tmp_path).csv)
    assert list(found[0]) == [
        "step",
        "split",
        "dropped_fraction_mean",
        "dropped_fraction_max",
        "load_cv_mean",
        "load_entropy_mean",
        "load_entropy_min",
        "router_entropy_mean",
    ]
    assert [row["step"] for row in found] == ["0", "10"]
    assert [row["dropped_fraction_mean"] for row in found] == ["0.1", "0.05"]


def test_routing_over_time_of_a_dense_run_is_an_error(tmp_path):
    for rows in ([], rows_of([1.0, 2.0]), routing_rows(2, split="test")):
        with pytest.raises(ValueError, match="finite routing scalar.*a dense model has none"):
            plots.routing_over_time(rows, tmp_path)
