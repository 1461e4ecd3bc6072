"""Capacity and positions against loops and worked examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.dispatch import PRIORITIES, capacity, positions


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "factor", "expected"),
    [
        (4, 2, 2, 4.0, 4),  # ceil(16) clipped to T
        (1, 8, 1, 1.0, 1),  # ceil(1/8)
        (5, 4, 1, 1.0, 2),  # ceil(5/4)
        (8, 4, 1, 1.0, 2),
        (10, 1, 1, 1.1, 10),
        (100, 10, 1, 1.1, 11),  # 100 * 1.1 = 110.00000000000001 would give 12
        (16, 8, 2, 1.0, 4),
        (1000, 8, 2, 1.25, 313),  # ceil(312.5)
        (3, 8, 1, 0.001, 1),
    ],
)
def test_capacity(num_tokens, num_experts, k, factor, expected):
    assert capacity(num_tokens, num_experts, k, factor) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 1.0), "num_tokens: got 0"),
        ((4, 0, 1, 1.0), "num_experts: got 0"),
        ((4, 2, 0, 1.0), "k: got 0"),
        ((4, 2, 1, 0.0), "capacity factor: got 0.0; allowed: finite numbers > 0"),
        ((4, 2, 1, -1.0), "capacity factor: got -1.0"),
        ((4, 2, 1, float("inf")), "capacity factor: got inf"),
        ((4, 2, 1, float("nan")), "capacity factor: got nan"),
    ],
)
def test_capacity_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        capacity(*arguments)


def slow_positions(expert, num_experts, priority, gate):
    """Serves assignments one by one in order of priority."""
    num_tokens, num_slots = expert.shape
    tokens = range(num_tokens)
    if priority == "arrival":
        order = [(t, j) for t in tokens for j in range(num_slots)]
    else:
        if priority == "gate":
            tokens = sorted(tokens, key=lambda t: (-max(gate[t]), t))
        order = [(t, j) for j in range(num_slots) for t in tokens]
    served = [0] * num_experts
    result = np.full(expert.shape, expert.size)
    for t, j in order:
        if expert[t, j] < num_experts:
            result[t, j] = served[expert[t, j]]
            served[expert[t, j]] += 1
    return result


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 3, 4), (40, 2, 7), (33, 8, 64)])
def test_positions_match_the_loop(priority, shape):
    num_tokens, num_slots, num_experts = shape
    rng = np.random.default_rng(0)
    for _ in range(5):
        expert = rng.integers(0, num_experts + 1, (num_tokens, num_slots)).astype(np.int32)
        # Gates on a coarse grid: many ties.
        gate = rng.integers(0, 4, (num_tokens, num_slots)).astype(np.float32)
        got = positions(jnp.array(expert), num_experts, priority=priority, gate=jnp.array(gate))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, slow_positions(expert, num_experts, priority, gate))


def test_worked_example():
    # Experts (0,1,0,0,2,0,1,3), capacity 2: expert 0 is asked by tokens 0,2,3,5; 3 and 5 are late.
    expert = jnp.array([0, 1, 0, 0, 2, 0, 1, 3])[:, None]
    position = positions(expert, 4, priority="arrival")
    np.testing.assert_array_equal(np.where(position[:, 0] >= capacity(8, 4, 1, 1.0))[0], [3, 5])


def test_the_three_priorities_differ():
    # All ask for expert 0 at first and expert 1 at second, or the other way round.
    expert = jnp.array([[1, 0], [0, 1], [0, 1]])
    gate = jnp.array([[0.5, 0.5], [0.6, 0.4], [0.9, 0.1]])
    ranks = {p: positions(expert, 2, priority=p, gate=gate).tolist() for p in PRIORITIES}
    assert ranks["arrival"] == [[0, 0], [1, 1], [2, 2]]
    assert ranks["first_choice"] == [[0, 2], [0, 1], [1, 2]]
    assert ranks["gate"] == [[0, 2], [1, 2], [0, 1]]


def test_positions_refuse():
    expert = jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="priority: got 'random'; allowed: arrival, first_choice"):
        positions(expert, 1, priority="random")
    with pytest.raises(ValueError, match="needs the gates"):
        positions(expert, 1, priority="gate")


@pytest.mark.parametrize("priority", PRIORITIES)
def test_temporaries_do_not_grow_with_the_number_of_experts(priority):
    def temporary_bytes(num_experts):
        run = jax.jit(lambda e, g: positions(e, num_experts, priority=priority, gate=g))
        shapes = (jax.ShapeDtypeStruct((4096, 2), d) for d in (jnp.int32, jnp.float32))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(256) <= 1.05 * temporary_bytes(4) + 8 * 256
