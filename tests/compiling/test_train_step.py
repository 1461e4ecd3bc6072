"""On eight CPU devices, for which the train step compiles as for those that are not there."""

import math

import jax
import pytest

from moe_jax.compiling import train_step
from moe_jax.compiling.chips import CHIPS
from moe_jax.compiling.collectives import axes_of, find_collectives
from moe_jax.compiling.topology import Topology, TopologyError
from moe_jax.compiling.train_step import bytes_per_device, compile_train_step
from moe_jax.config import base_config, resolve_runs

pytestmark = pytest.mark.sweep


@pytest.fixture
def compile_on(monkeypatch):
    """(number of devices, overrides by section) -> the Program."""

    def compile_config(num_devices, **sections):
        config = base_config()
        config.data.sequence_length, config.data.batch_size = 8, 16
        config.model.width, config.model.num_layers, config.model.num_heads = 32, 2, 2
        config.model.scan_layers = True
        config.moe.num_experts, config.moe.expert_width = 4, 16
        for section, values in sections.items():
            config[section].update(values)
        topology = Topology("test", CHIPS["v5e"], num_devices, "cpu", {})
        devices = jax.devices()[:num_devices]
        monkeypatch.setattr(train_step, "devices_of", lambda topology: devices)
        said = []
        program = compile_train_step(resolve_runs(config)[""], topology, said.append)
        assert "compiling it for" in said[-1]
        return program

    return compile_config


def test_the_sharded_step_of_a_mesh(compile_on, quick_compilation):
    program = compile_on(8, mesh=dict(fsdp=2, expert=2), optimizer=dict(accumulate_steps=2))
    assert dict(program.mesh.shape) == dict(data=2, fsdp=2, expert=2, tensor=1)
    assert "xla_cpu" in program.backend
    # Everything but norms (5 of 32) and routers (2 of [32, 4]) is shared by fsdp, the experts (2
    # layers of 4 of [32, 16] and [16, 32]) also by expert.
    whole = 5 * 32 + 2 * 32 * 4
    matrices = 257 * 32 + 2 * 4 * 32 * 32
    experts = 2 * 4 * 2 * 32 * 16
    expected = 4 * (whole + matrices // 2 + experts // 4)
    assert bytes_per_device(program.state.params) == expected
    # Both moments, and the counters of steps.
    assert 0 <= bytes_per_device(program.state.opt_state) - 2 * expected < 100
    stats = program.compiled.memory_analysis()
    # The state is donated: all of it is written where it was read.
    state = bytes_per_device(program.state)
    tokens = math.prod((16, 9)) // 8 * 4
    assert stats.argument_size_in_bytes == state + tokens
    assert stats.alias_size_in_bytes == state
    found = find_collectives(program.compiled.as_text())
    kinds = {(c.kind, axes_of(c.groups, program.mesh.shape)) for c in found}
    assert ("all-to-all", ("expert",)) in kinds
    # Twice there and twice back, in each of two layers and two microbatches, and as often again in
    # the backward pass; at least.
    exchanges = sum(c.times for c in found if axes_of(c.groups, program.mesh.shape) == ("expert",))
    assert exchanges >= 2 * 2 * 2
    assert [c for c in found if c.groups is None or not c.certain] == []


def test_one_device_needs_no_collective(compile_on, quick_compilation):
    program = compile_on(1, moe=dict(num_experts=0))
    assert program.mesh.size == 1
    assert find_collectives(program.compiled.as_text()) == []


def test_a_mesh_that_leaves_devices_out_is_refused(compile_on):
    with pytest.raises(TopologyError, match="config.mesh: got 2 of the 8 devices of test; allowed"):
        compile_on(8, mesh=dict(data=2))
