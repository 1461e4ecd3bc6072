"""Picks a backend for the device and says which.

Axis legend: T tokens, E experts, k choices, N rows, d and f the inner and outer width of a product.
"""

import functools
import importlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax.kernels import grouped
from moe_jax.kernels.backend import Backend, check_index
from moe_jax.kernels.manual import vary_alike

# GPUs with the instructions that our kernels are made of, and TPUs without room for their blocks.
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
_SMALL_TPUS = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")


class Work(NamedTuple):
    """What a backend is asked for, and where.

    Attributes:
      dtype: of rows and matrices.
      widths: d and f; a backend may need multiples of something.
      platform: cpu, gpu or tpu.
      kind: of the device, as jax names it.
    """

    dtype: jnp.dtype
    widths: tuple[int, ...]
    platform: str
    kind: str


class _Candidate(NamedTuple):
    about: str
    module: str  # is imported when the backend is used
    attribute: str
    refuses: Callable[[Work], str | None]  # why it cannot


def _refuses_nothing(work):
    return None


def _xla_ragged_refuses(work):
    if work.platform != "tpu":
        return f"costs E times the work on {work.platform}"
    if jax.__version_info__ < (0, 11):
        return f"its weight gradient costs E times the work in jax {jax.__version__} (needs 0.11)"
    return None


def _pallas_tpu_refuses(work):
    if work.platform != "tpu":
        return f"is made for tpu, this is {work.platform}"
    if work.kind in _SMALL_TPUS:
        return f"is made for TPU v5e and later, this is {work.kind}"
    if work.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, got {work.dtype}"
    return None


def _mosaic_gpu_refuses(work):
    if work.platform != "gpu":
        return f"is made for gpu, this is {work.platform}"
    if not _HOPPER.search(work.kind):
        return f"is made for Hopper (H100, H200), this is {work.kind}"
    if work.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {work.dtype}"
    if any(width % 8 for width in work.widths):
        return f"takes widths that are multiples of 8, got {work.widths}"
    return None


def _tokamax_refuses(work):
    from moe_jax.kernels import ragged

    if not ragged.has_tokamax():
        return "is not installed (pip install tokamax)"
    if work.platform == "cpu":
        return "has no kernel for cpu"
    if work.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, got {work.dtype}"
    inner, outer = (jax.ShapeDtypeStruct((256, width), work.dtype) for width in work.widths[:2])
    matrices = jax.ShapeDtypeStruct((2, *work.widths[:2]), work.dtype)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    outer_product = functools.partial(ragged.TOKAMAX.outer, dtype=work.dtype)
    try:
        jax.eval_shape(ragged.TOKAMAX.matmul, inner, matrices, sizes)
        # It has kernels for some GPUs that do not have one for the gradient.
        jax.eval_shape(outer_product, inner, outer, sizes)
    except (NotImplementedError, ValueError) as error:
        return f"does not take it: {error}".splitlines()[0]
    return None


_CANDIDATES = {
    "xla_cpu": _Candidate(
        "loops over tiles of rows, in XLA", "xla_cpu", "BACKEND", _refuses_nothing
    ),
    "pallas_tpu": _Candidate(
        "our Pallas kernels for TPU", "pallas_tpu.backend", "BACKEND", _pallas_tpu_refuses
    ),
    "mosaic_gpu": _Candidate(
        "our Pallas kernels for Hopper GPUs", "mosaic_gpu.backend", "BACKEND", _mosaic_gpu_refuses
    ),
    "tokamax": _Candidate("tokamax's ragged dot", "ragged", "TOKAMAX", _tokamax_refuses),
    "xla_ragged": _Candidate("XLA's ragged dot", "ragged", "XLA", _xla_ragged_refuses),
    "reference": _Candidate(
        "every matrix meets every row, for tests", "reference", "BACKEND", _refuses_nothing
    ),
}
BACKENDS: tuple[str, ...] = tuple(_CANDIDATES)

# The first that does not refuse is taken.
_PREFERENCE = {
    "cpu": ("xla_cpu",),
    "gpu": ("tokamax", "mosaic_gpu", "xla_cpu"),
    "tpu": ("tokamax", "pallas_tpu", "xla_ragged", "xla_cpu"),
}


def current_device() -> tuple[str, str]:
    """Platform and kind of the mesh in use (``jax.set_mesh``), else of jax's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):  # the name of a platform
        device = jax.devices(device)[0]
    return device.platform, device.device_kind


def select(dtype: DTypeLike, widths: tuple[int, ...], backend: str | None = None) -> Backend:
    """The backend for rows of ``dtype`` and matrices of ``widths`` on the current platform.

    Args:
      dtype: of the rows.
      widths: d and f.
      backend: a name of ``BACKENDS`` to take instead of choosing.

    Raises:
      ValueError: unknown name, or a backend that refuses, with its reason.
    """
    work = Work(jnp.dtype(dtype), tuple(widths), *current_device())
    if backend is None:
        names = _PREFERENCE.get(work.platform, ("xla_cpu",))
        backend = next(n for n in names if _CANDIDATES[n].refuses(work) is None)
    elif backend in _CANDIDATES:
        reason = _CANDIDATES[backend].refuses(work)
        if reason is not None:
            raise ValueError(f"backend: got {backend!r}, which {reason}")
    return load(backend)


def refusal(backend: str, dtype: DTypeLike, widths: tuple[int, ...]) -> str | None:
    """Why a backend cannot do this work on the current device; None if it can."""
    return _CANDIDATES[backend].refuses(Work(jnp.dtype(dtype), tuple(widths), *current_device()))


def check_name(backend: str | None) -> None:
    """Refuses what is neither a name of ``BACKENDS`` nor None.

    Raises:
      ValueError: unknown name.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}; allowed: {', '.join(BACKENDS)}, or None")


def load(backend: str) -> Backend:
    """The backend of that name.

    Raises:
      ValueError: unknown name.
    """
    check_name(backend)
    candidate = _CANDIDATES[backend]
    module = importlib.import_module(f"moe_jax.kernels.{candidate.module}")
    return getattr(module, candidate.attribute)


def explain(
    dtype: DTypeLike = jnp.float32,
    widths: tuple[int, ...] = (128, 128),
    backend: str | None = None,
) -> str:
    """Which backend computes the experts here, and why not the others; for people.

    Args:
      dtype: of the rows.
      widths: d and f.
      backend: a name of ``BACKENDS`` that is asked for; None: the best for the device.

    Returns:
      One line that names the choice, then one line a backend.

    Raises:
      ValueError: unknown name, or a backend that refuses, with its reason.
    """
    work = Work(jnp.dtype(dtype), tuple(widths), *current_device())
    chosen = select(dtype, widths, backend).name
    lines = [f"kernels: {chosen} on {work.kind} for {work.dtype}, widths {work.widths}"]
    for name, candidate in _CANDIDATES.items():
        reason = candidate.refuses(work)
        if name == chosen:
            state = "chosen"
        elif reason is not None:
            state = reason
        elif name in _PREFERENCE.get(work.platform, ()):
            state = "could serve"
        else:
            state = "on request"
        lines.append(f"  {name:<11} {candidate.about}: {state}")
    return "\n".join(lines)


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, backend: str | None = None
) -> jax.Array:
    """Multiplies each group of rows of lhs by its own matrix.

    Reverse-mode differentiable once, in lhs and rhs. bfloat16 inputs are accumulated in float32.

    Args:
      lhs: float[N, d], rows sorted by group; row 0 is the first row of group 0.
      rhs: float[E, d, f].
      group_sizes: integer[E], rows of each group; each >= 0 and the sum <= N, which is not checked.
      backend: a name of ``BACKENDS``; None: the best for the device, see ``explain``.

    Returns:
      float[N, f] of lhs's dtype; rows past the sum of the sizes are 0 and get no gradient.

    Raises:
      ValueError: shapes that do not fit, an unknown backend or one that refuses.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"got lhs {lhs.shape}, rhs {rhs.shape}; allowed: [N, d] and [E, d, f]")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"group_sizes: got shape {group_sizes.shape}; allowed: {rhs.shape[:1]}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes: got dtype {group_sizes.dtype}; allowed: integers")
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise ValueError(f"{name}: got dtype {array.dtype}; allowed: floating-point numbers")
    check_index(lhs.shape[0], "rows N")
    dtype = jnp.result_type(lhs, rhs)
    chosen = select(dtype, rhs.shape[1:], backend)
    group_sizes = group_sizes.astype(jnp.int32)
    arrays = vary_alike(lhs.astype(dtype), rhs.astype(dtype), group_sizes)
    out = grouped.matmul(chosen, *arrays)
    return out.astype(lhs.dtype)
