"""The drop of a uniform router by the exact formula: golden numbers and a simulation."""

import numpy as np
import pytest

from moe_jax.analysis import expected_drop_fraction


@pytest.mark.parametrize(
    "num_tokens, factor, expected",
    [
        (64, 1.0, 0.1305469597),
        (1024, 1.0, 0.0329625890),
        (4096, 1.0, 0.0164894877),
        (64, 1.25, 0.0453130580),
        (1024, 1.25, 4.19996e-5),
        (4096, 1.25, 1.669e-11),
    ],
)
def test_golden(num_tokens, factor, expected):
    drop = expected_drop_fraction(num_tokens, 8, factor)
    digits = {4.19996e-5: 2e-6, 1.669e-11: 3e-4}
    np.testing.assert_allclose(drop, expected, rtol=digits.get(expected, 1e-8))


def test_by_hand():
    # Two tokens, two experts, one place each: both want the same expert half the time, and one of
    # the two is dropped then.
    assert expected_drop_fraction(2, 2, 1.0) == pytest.approx(0.25)
    assert expected_drop_fraction(10, 1, 1.0) == 0


def test_simulation():
    loads = np.random.default_rng(0).multinomial(64, [1 / 8] * 8, size=20_000)
    simulated = np.maximum(loads - 8, 0).sum(axis=1) / 64
    error = simulated.std() / np.sqrt(len(simulated))
    assert abs(simulated.mean() - expected_drop_fraction(64, 8, 1.0)) < 4 * error


def test_out_of_range_is_refused():
    with pytest.raises(ValueError, match="capacity factor: got 0"):
        expected_drop_fraction(8, 2, 0)
