import pytest

from moe_jax.compiling.collectives import Collective
from moe_jax.compiling.estimate import StepTime, remedies, step_time, summarize
from moe_jax.compiling.topology import parse_topology
from moe_jax.config import base_config

MESH = {"data": 2, "fsdp": 8, "expert": 1, "tensor": 1}
NODE, ACROSS = [list(range(8)), list(range(8, 16))], [[i, i + 8] for i in range(8)]


def test_traffic_is_summed_by_kind_and_axes():
    found = [
        Collective("all-gather", 10.0, NODE, times=3, certain=True),
        Collective("all-gather", 5.0, NODE, times=1, certain=False),
        Collective("all-reduce", 100.0, ACROSS, times=2, certain=True),
        Collective("all-reduce", 0.0, [[i] for i in range(16)], times=9, certain=True),
    ]
    reduce, gather = summarize(found, MESH, parse_topology("h100x16"))
    assert reduce == ("all-reduce", "data", 2, 200.0, 200.0, True)
    assert gather == ("all-gather", "fsdp", 4, 35.0, 0.0, False)
    assert all(row.far_bytes == 0 for row in summarize(found, MESH, parse_topology("v5p:4x4x1")))


def test_the_time_of_a_step():
    topology = parse_topology("h100x16")
    found = [
        Collective("all-gather", 450e9, NODE, times=1, certain=True),
        Collective("all-reduce", 50e9, ACROSS, times=3, certain=True),
    ]
    traffic = summarize(found, MESH, topology)
    seconds = step_time(topology, flops=2 * 989e12, hbm_bytes=3350e9 / 2, traffic=traffic)
    # A second within the node at 450 GB/s, and three across nodes at 50 GB/s.
    assert seconds == pytest.approx((2.0, 0.5, 4.0))
    assert StepTime(2.0, 0.5, 4.0).overlapped == 4.0 and StepTime(2.0, 0.5, 4.0).serial == 6.5


def test_two_devices_share_a_chip():
    topology = parse_topology("tpu7x:2x2x1")
    seconds = step_time(topology, flops=2307e12 / 2, hbm_bytes=7380e9 / 2, traffic=[])
    assert seconds == pytest.approx((1.0, 1.0, 0.0))


def test_remedies_are_those_that_are_left():
    config = base_config()
    config.data.batch_size, config.optimizer.accumulate_steps = 64, 2
    first = remedies(config, MESH)
    assert "--config.model.remat=true" in first
    # 64 / 2 / 16 are two sequences a device.
    assert "--config.optimizer.accumulate_steps=4" in first
    assert "--config.mesh.fsdp of more than 8, up to 16" in first
    config.model.remat, config.optimizer.accumulate_steps = True, 4
    rest = remedies(config, MESH | {"data": 1, "fsdp": 16})
    assert rest == [
        "--config.mesh.tensor of more than 1",
        "--config.data.batch_size of less than 64",
        "a topology of more chips",
    ]
