"""Published figures of the chips that a train step can be compiled for."""

from typing import NamedTuple

_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30


class Chip(NamedTuple):
    """A chip, per chip. Bandwidths are what goes out; as much comes in at the same time.

    Attributes:
      name: for people.
      peak_flops: bf16 matrix products, dense, FLOP/s.
      hbm_bytes: capacity.
      hbm_bandwidth: bytes/s.
      near_bandwidth: bytes/s to other chips of a slice (TPU) or of a node (GPU), over all links.
      far_bandwidth: bytes/s to chips of other slices or nodes.
      num_devices: how many devices jax makes of it; they share everything evenly.
      chips_per_node: chips that near_bandwidth connects; None: all of the topology.
    """

    name: str
    peak_flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    near_bandwidth: float
    far_bandwidth: float
    num_devices: int = 1
    chips_per_node: int | None = None


# TPUs: the pages "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x" of docs.cloud.google.com/tpu/docs, as
# of 2026. Their interconnect is given in both directions together and halved here; bits are bytes
# here. A v5p has two cores that jax sees as one device (megacore); a TPU7x is two devices.
# GPUs: data sheets of H100 SXM (80 GB) and of DGX B200 with dense bf16 rates, NVLink of both
# directions halved, and one 400 Gb/s network card for each GPU, as DGX systems have them.
CHIPS = {
    "v5e": Chip("TPU v5e", 197 * _TERA, 16 * _GIGA, 819 * _GIGA, 200 * _GIGA, 3.125 * _GIGA),
    "v5p": Chip("TPU v5p", 459 * _TERA, 95 * _GIB, 2765 * _GIGA, 600 * _GIGA, 6.25 * _GIGA),
    "v6e": Chip("TPU v6e", 918 * _TERA, 32 * _GIB, 1638 * _GIGA, 400 * _GIGA, 12.5 * _GIGA),
    "tpu7x": Chip(
        "TPU7x", 2307 * _TERA, 192 * _GIB, 7380 * _GIGA, 600 * _GIGA, 12.5 * _GIGA, num_devices=2
    ),
    "h100": Chip(
        "H100 SXM", 989 * _TERA, 80 * _GIGA, 3350 * _GIGA, 450 * _GIGA, 50 * _GIGA, chips_per_node=8
    ),
    "b200": Chip(
        "B200", 2250 * _TERA, 180 * _GIGA, 8000 * _GIGA, 900 * _GIGA, 50 * _GIGA, chips_per_node=8
    ),
}
