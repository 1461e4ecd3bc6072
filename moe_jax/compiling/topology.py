"""Names such as v5p:8x8x8 or h100x64, and the devices that they stand for."""

import math
import re
from typing import Any, NamedTuple

from moe_jax.compiling.chips import CHIPS, Chip
from moe_jax.kernels.targets import GPU_CONFIGS

_DIMENSIONS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}
ALLOWED = (
    "v5p:AxBxC, tpu7x:AxBxC, v6e:AxB, v5e:AxB (chips along each side, such as v5p:4x4x4),"
    " h100xN, b200xN (N GPUs, less than 8 or a multiple of 8)"
)


class TopologyError(ValueError):
    """A topology that cannot be had; the message is one line."""


class Topology(NamedTuple):
    """Chips and how jax is asked for them.

    Attributes:
      name: as it was given.
      chip: of which it is made.
      num_chips: in all.
      platform: "tpu" or "cuda".
      options: arguments of ``jax.experimental.topologies.get_topology_desc``.
    """

    name: str
    chip: Chip
    num_chips: int
    platform: str
    options: dict[str, Any]

    @property
    def devices_per_node(self) -> int:
        """Devices of jax that the fast links connect."""
        return (self.chip.chips_per_node or self.num_chips) * self.chip.num_devices


def parse_topology(name: str) -> Topology:
    """The topology of that name.

    Raises:
      TopologyError: no such topology.
    """
    refused = TopologyError(f"--topology: got {name!r}; allowed: {ALLOWED}")
    tpu = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    gpu = re.fullmatch(r"([a-z]+\d+)x(\d+)", name)
    if tpu and tpu[1] in _DIMENSIONS:
        sides = [int(side) for side in tpu[2].split("x")]
        if len(sides) != _DIMENSIONS[tpu[1]] or not all(sides):
            raise refused
        options = dict(platform="tpu", topology_name=name)
        return Topology(name, CHIPS[tpu[1]], math.prod(sides), "tpu", options)
    if gpu and gpu[1] in GPU_CONFIGS:
        count = int(gpu[2])
        chip = CHIPS[gpu[1]]
        if not count or count > chip.chips_per_node and count % chip.chips_per_node:
            raise refused
        nodes = -(-count // chip.chips_per_node)
        options = dict(
            platform="cuda",
            topology_name="",
            topology=f"1x{nodes}x{count // nodes}",
            target_config=GPU_CONFIGS[gpu[1]],
        )
        return Topology(name, chip, count, "cuda", options)
    raise refused


def devices_of(topology: Topology) -> list:
    """Its devices, good for compiling only.

    Raises:
      TopologyError: the compiler is not installed, or knows of no such sizes.
    """
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**topology.options).devices)
    except Exception as error:  # each plugin has its own, of every kind
        reason = " ".join(str(error).split())[:200]
        if re.search(r"not (found|installed|implemented for)|no module|[Uu]nknown|plugin", reason):
            reason = f"its compiler is not installed (pip install -e '.[compile]'): {reason}"
        raise TopologyError(f"--topology: got {topology.name!r}: {reason}") from None
