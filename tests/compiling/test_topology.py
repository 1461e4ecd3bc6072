import re

import pytest

from moe_jax.compiling import topology as topologies
from moe_jax.compiling.chips import CHIPS
from moe_jax.compiling.topology import ALLOWED, TopologyError, parse_topology


def test_tpus():
    v5p = parse_topology("v5p:8x8x8")
    assert (v5p.chip, v5p.num_chips, v5p.platform) == (CHIPS["v5p"], 512, "tpu")
    assert v5p.devices_per_node == 512
    assert parse_topology("v6e:16x16").num_chips == 256
    tpu7x = parse_topology("tpu7x:2x2x1")
    assert (tpu7x.num_chips, tpu7x.devices_per_node) == (4, 8)


@pytest.mark.parametrize(
    "name, shape", [("h100x64", "1x8x8"), ("b200x8", "1x1x8"), ("h100x4", "1x1x4")]
)
def test_gpus(name, shape):
    topology = parse_topology(name)
    assert topology.options["topology"] == shape
    assert topology.num_chips == int(name.split("x")[1])
    assert topology.devices_per_node == 8


@pytest.mark.parametrize(
    "name",
    ["", "v5p", "v5p:8", "v5p:8x8", "v6e:2x2x2", "v5e:0x4", "v9:2x2", "h100", "h100x12", "h100x0"],
)
def test_others_are_refused_with_what_is_allowed(name):
    with pytest.raises(
        TopologyError, match=re.escape(f"--topology: got {name!r}; allowed: {ALLOWED}")
    ):
        parse_topology(name)


def test_without_the_compiler_the_error_says_how_to_get_it(monkeypatch):
    def missing(**options):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(TopologyError, match=re.escape("pip install -e '.[compile]'")):
        topologies.devices_of(parse_topology("v5p:2x2x1"))
