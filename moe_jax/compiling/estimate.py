"""How long a compiled train step could take, and what would make it smaller: estimates.

Everything is of one device, unless said otherwise.
"""

from typing import NamedTuple

from moe_jax.compiling.collectives import Collective, axes_of, crosses_nodes
from moe_jax.compiling.topology import Topology


class Traffic(NamedTuple):
    """Collectives of one kind along the same axes of the mesh, in one step.

    Attributes:
      kind: of ``collectives.KINDS``.
      axes: names joined by "+".
      executions: of such instructions.
      bytes_sent: by one device.
      far_bytes: the part of it in groups that are on several nodes.
      certain: False: a loop without a known number of rounds counts as one round.
    """

    kind: str
    axes: str
    executions: int
    bytes_sent: float
    far_bytes: float
    certain: bool


class StepTime(NamedTuple):
    """Seconds of a step if each resource had only its own work to do, at its published rate.

    Attributes:
      compute: of the matrix products at bf16 peak, the forward pass twice with remat.
      hbm: state read and written once, temporaries written and read once a microbatch.
      network: all bytes sent over all links of a chip, and over the network card of its own
        where a group spans nodes; no latency.
    """

    compute: float
    hbm: float
    network: float

    @property
    def overlapped(self) -> float:
        """Everything at the same time."""
        return max(self)

    @property
    def serial(self) -> float:
        """One after the other."""
        return sum(self)


def summarize(
    found: list[Collective], mesh_shape: dict[str, int], topology: Topology
) -> list[Traffic]:
    """Collectives by kind and by mesh axes, those that send most first."""
    rows = {}
    for c in found:
        key = (c.kind, "+".join(axes_of(c.groups, mesh_shape)))
        row = rows.get(key, Traffic(*key, 0, 0.0, 0.0, True))
        sent = c.bytes_sent * c.times
        far = sent if crosses_nodes(c.groups, topology.devices_per_node) else 0.0
        rows[key] = row._replace(
            executions=row.executions + c.times,
            bytes_sent=row.bytes_sent + sent,
            far_bytes=row.far_bytes + far,
            certain=row.certain and c.certain,
        )
    # What does not leave its device, as groups of one, is no traffic.
    used = [row for row in rows.values() if row.axes and row.bytes_sent]
    return sorted(used, key=lambda row: -row.bytes_sent)


def step_time(
    topology: Topology, *, flops: float, hbm_bytes: float, traffic: list[Traffic]
) -> StepTime:
    """The StepTime of a device that does ``flops`` and moves ``hbm_bytes`` in a step."""
    chip, shared = topology.chip, topology.chip.num_devices
    far = sum(row.far_bytes for row in traffic)
    near = sum(row.bytes_sent for row in traffic) - far
    return StepTime(
        flops * shared / chip.peak_flops,
        hbm_bytes * shared / chip.hbm_bandwidth,
        (near / chip.near_bandwidth + far / chip.far_bandwidth) * shared,
    )


def remedies(config, mesh_shape: dict[str, int]) -> list[str]:
    """What would make a step of this single-run config need less memory, the cheapest first."""
    found = []
    if not config.model.remat:
        found.append("--config.model.remat=true")
    shards = mesh_shape["data"] * mesh_shape["fsdp"] * mesh_shape["expert"]
    sequences = config.data.batch_size // config.optimizer.accumulate_steps // shards
    if sequences > 1:
        most = config.optimizer.accumulate_steps * sequences
        found.append(f"--config.optimizer.accumulate_steps={most}")
    if mesh_shape["data"] > 1:
        most = mesh_shape["data"] * mesh_shape["fsdp"]
        found.append(f"--config.mesh.fsdp of more than {mesh_shape['fsdp']}, up to {most}")
    found.append(f"--config.mesh.tensor of more than {mesh_shape['tensor']}")
    found.append(f"--config.data.batch_size of less than {config.data.batch_size}")
    return found + ["a topology of more chips"]
