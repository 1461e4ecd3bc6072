"""The picture of the routers' gates: what jumps, what does not, and that it is drawn."""

import csv

import numpy as np
import pytest
from matplotlib.image import imread

from moe_jax.analysis.gates import draw_gates, gate_curves
from moe_jax.analysis.plots import gate_panels
from moe_jax.routing import ROUTERS


@pytest.fixture(scope="module")
def curves():
    return gate_curves(101)


def largest_step(values):
    return np.abs(np.diff(values, axis=0)).max()


def test_every_panel_is_of_a_router(curves):
    names = {title.split(",")[0] for title in curves[1]}
    assert names <= set(ROUTERS) and len(names) == 12
    for gates in curves[1].values():
        assert gates.shape == (101, 5) and np.isfinite(gates).all() and (gates >= 0).all()


def test_hard_gates_jump_where_the_two_experts_swap(curves):
    swept, gates = curves
    # At z = 1 expert 2 takes the place of expert 1 with a gate of e / (e + e^2) = .269.
    step = np.abs(np.diff(gates["top_k_softmax"][:, 2]))
    assert step.max() > 0.26
    assert swept[step.argmax()] <= 1.0 <= swept[step.argmax() + 1]
    assert largest_step(gates["sigmoid_top_k"]) > 0.4


def test_smooth_gates_do_not(curves):
    # The line has steps of 0.05; nothing here has a slope beyond 1.
    for name in ("smooth_top_k, ε = 1", "relu_gate", "smear"):
        assert largest_step(curves[1][name]) < 0.06


def test_it_is_drawn(tmp_path):
    picture = draw_gates(tmp_path)
    image = imread(picture.png)
    assert min(image.shape[:2]) > 500 and image[..., :3].std() > 0.02
    with picture.csv.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 * 401
    assert rows[0].keys() == {"router", "logit", *(f"expert_{e}" for e in range(5))}


def test_other_sizes_and_wrong_shapes(tmp_path):
    line = np.linspace(0, 1, 7)
    picture = gate_panels(line, {"one": np.ones((7, 2))}, tmp_path, moving=0, boundary=0.5)
    assert picture.png.exists()
    with pytest.raises(ValueError, match="curves: got none"):
        gate_panels(line, {}, tmp_path, moving=0, boundary=0.5)
    with pytest.raises(ValueError, match=r"curves\['b'\]: got shape \(6, 2\); allowed: \(7, 2\)"):
        curves = {"a": np.ones((7, 2)), "b": np.ones((6, 2))}
        gate_panels(line, curves, tmp_path, moving=0, boundary=0.5)
