"""Compiles for accelerators that are not there.

The TPU and the GPU compiler of jax run on any machine: ``pip install jax[tpu,cuda13-local]``. The
process must not own an accelerator and must start with the variables of ``ENVIRONMENT``, which jax
reads when it is imported.
"""

import contextlib
import functools

import jax
import jax.extend.backend
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Do not ask a cloud's metadata server for a TPU, nor for the right to be its only user.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _gpu_config(
    description, *, capability, cores, memory_bytes, memory_bandwidth, l2_bytes, clock_ghz
):
    """What XLA's compiler needs to know of a GPU: a GpuTargetConfig in text form."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {memory_bandwidth} l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock_ghz} device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{description}"
"""


GPU_CONFIGS = {
    "h100": _gpu_config(  # SXM, 80 GB
        "NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        memory_bytes=84929347584,
        memory_bandwidth=3352320000000,
        l2_bytes=52428800,
        clock_ghz=1.98,
    ),
    "b200": _gpu_config(
        "NVIDIA B200",
        capability=10,
        cores=148,
        memory_bytes=191502483456,
        memory_bandwidth=8000000000000,
        l2_bytes=132644864,
        clock_ghz=1.965,
    ),
}

TARGETS = {
    "v5e": dict(platform="tpu", topology_name="v5e:2x4"),
    "v5p": dict(platform="tpu", topology_name="v5p:2x2x1"),
    "v6e": dict(platform="tpu", topology_name="v6e:2x4"),
    "h100": dict(
        platform="cuda", topology_name="", topology="1x1x1", target_config=GPU_CONFIGS["h100"]
    ),
}


@functools.cache
def device_of(target: str) -> jax.Device:
    """One device of a target, good for compiling only.

    Raises:
      ValueError: unknown target.
      RuntimeError: the target's compiler is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target: got {target!r}; allowed: {', '.join(TARGETS)}")
    return topologies.get_topology_desc(**TARGETS[target]).devices[0]


@contextlib.contextmanager
def as_default_device(device: jax.Device):
    """Has libraries that ask jax what it runs on, as tokamax does, hear of ``device``.

    What jax itself runs on stays as it is: no work can be done on a device that is not there.
    """
    before = jax.extend.backend.get_default_device
    jax.extend.backend.get_default_device = lambda: device
    try:
        yield
    finally:
        jax.extend.backend.get_default_device = before


def compile_for(target: str, function, *arguments) -> jax.stages.Compiled:
    """Compiles ``function`` for one device of a target.

    Args:
      target: one of ``TARGETS``.
      function: of arrays, or jitted.
      *arguments: arrays or ShapeDtypeStructs, in pytrees.

    Returns:
      The program, with ``memory_analysis()``, on TPU ``cost_analysis()``, and ``as_text()``.
    """
    device = device_of(target)
    mesh = Mesh([device], ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=(TARGETS[target]["platform"],)).compile()
