"""Where the hard gate jumps, and that the smooth one does not."""

import functools

import jax
import numpy as np
import pytest

from moe_jax.routing import dense_gates, smooth_top_k, top_k_softmax

LOGITS = np.array([2.0, 1.0, 0.7, 0.2, -1.0], np.float32)
K = 2
SHAPES = [(1.0, 50.0), (1.0, 1.0), (3.0, 2.0), (2.0, 2.0), (0.5, 0.5)]


@pytest.fixture(scope="module", autouse=True)
def compile_once(quick_compilation):
    """For every test of this file."""


@jax.jit
def hard(logits):
    return dense_gates(top_k_softmax(logits, K))


@functools.partial(jax.jit, static_argnames=("a", "b"))
def smooth(logits, epsilon, a=2.0, b=2.0):
    return dense_gates(smooth_top_k(logits, K, epsilon, a=a, b=b))


def line(num_points):
    """The last logit of the five rises from -1 to 3; it passes the second, 1, half way."""
    share = np.linspace(0.0, 1.0, num_points)[:, None]
    return (LOGITS + share * np.array([0.0, 0.0, 0.0, 0.0, 4.0])).astype(np.float32)


def largest_step(gates):
    """Of the output along the line, for experts whose outputs are the constants 0, 1, 2, 3, 4."""
    return np.abs(np.diff(np.asarray(gates, np.float64) @ np.arange(5.0))).max()


@pytest.mark.parametrize("num_points", [10**3, 10**4, 10**5])
def test_the_hard_gate_jumps_and_the_smooth_one_does_not(num_points):
    # At the tie experts 1 and 4 have logit 1 beside a logit of 2, so the hard gate moves 1/(1+e) =
    # .268941 from output 1 to output 4: a jump of 3 * .268941 = .806824 however close the points.
    steps = largest_step(hard(line(num_points)))
    np.testing.assert_allclose(steps, 0.806824 + 1.6 / num_points, atol=0.05 / num_points + 1e-5)
    # The smooth gate has slope 4.5 along this line at most: ten times the points, a tenth of it.
    steps = largest_step(smooth(line(num_points), 1.0))
    np.testing.assert_allclose(steps, 4.525 / num_points, rtol=2e-3 + num_points * 1e-7)


@pytest.mark.parametrize(
    ("a", "b", "slope"), [(1.0, 50.0, 17.25), (1.0, 1.0, 4.74), (3.0, 2.0, 5.53)]
)
def test_the_smooth_gate_has_a_slope_for_other_shapes(a, b, slope):
    for num_points in (10**3, 10**4):
        steps = largest_step(smooth(line(num_points), 1.0, a, b))
        np.testing.assert_allclose(steps, slope / num_points, rtol=5e-3)


def test_a_smaller_margin_is_steeper_and_still_has_no_jump():
    for num_points in (10**4, 10**5):
        steps = largest_step(smooth(line(num_points), 0.1))
        assert steps < 63 / num_points
    assert largest_step(smooth(line(10**3), 0.1)) > 3 * largest_step(smooth(line(10**3), 1.0))


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("place", ["tie", "margin"])
def test_both_sides_of_a_boundary_agree(a, b, place):
    # Expert 2 passes the second best, or enters the margin of 0.6 below it.
    middle = {"tie": 1.0, "margin": 0.4}[place]
    moved = np.array([0.0, 0.0, 1.0, 0.0, 0.0], np.float32)
    start = np.where(moved, np.float32(middle), LOGITS)
    gaps = []
    for distance in (1e-2, 1e-3, 1e-4):
        sides = start + np.outer([-distance, 0.0, distance], moved).astype(np.float32)
        left, at, right = np.asarray(smooth(sides, 0.6, a, b))
        gaps.append(max(np.abs(left - right).max(), np.abs(left - at).max()))
    # By the square root of the distance at worst, for a or b of 0.5.
    assert gaps[-1] < 5e-3
    assert gaps[2] < 0.4 * gaps[1] + 1e-6 and gaps[1] < 0.4 * gaps[0] + 1e-6
    if place == "tie":
        left, _, right = np.asarray(hard(sides))
        assert np.abs(left - right).max() > 0.26


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_a_tie_of_many_and_every_order_of_them(a, b):
    # z_[k] has a kink there, and no side of it a jump.
    tie = np.array([2.0, 1.0, 1.0, 1.0, -1.0], np.float32)
    directions = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    at = smooth(tie[None], 0.6, a, b)
    for distance in (1e-2, 1e-4):
        around = smooth((tie + distance * directions).astype(np.float32), 0.6, a, b)
        assert np.abs(around - at).max() < 2 * np.sqrt(distance)
    hard_gates = np.asarray(hard((tie + 1e-4 * directions).astype(np.float32)))
    assert np.abs(hard_gates - hard_gates[0]).max() > 0.26


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_the_gate_is_continuous_in_the_margin(a, b):
    gates = jax.jit(jax.vmap(lambda margin: smooth(LOGITS[None], margin, a, b)[0]))
    # From one where experts 0 and 1 are alone to one where all five are active.
    steps = {}
    for num_points in (10**3, 10**4):
        path = np.asarray(gates(np.linspace(0.2, 3.0, num_points, dtype=np.float32)))
        steps[num_points] = np.abs(np.diff(path, axis=0)).max()
        # By the square root of the distance at worst, for a or b of 0.5.
        assert steps[num_points] < 0.5 * np.sqrt(2.8 / num_points)
    if a >= 1 and b >= 1:
        assert steps[10**4] < 0.15 * steps[10**3]
    assert (path[0] > 0).sum() == 2 and (path[-1] > 0).sum() == 5
    np.testing.assert_allclose(path[0], hard(LOGITS[None])[0], atol=1e-6)
    # From above and below where expert 2 enters, at a margin of 0.3.
    below, above = gates(np.array([0.3 - 1e-5, 0.3 + 1e-5], np.float32))
    np.testing.assert_allclose(below, above, atol=3e-3)
