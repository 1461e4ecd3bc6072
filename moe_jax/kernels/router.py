"""Fused top-k routing: from logits to experts, gates and places in one pass.

Axis legend: T tokens, E experts, k choices.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels import api
from moe_jax.kernels.backend import MOST_CHOICES, MOST_EXPERTS, Backend, check_index
from moe_jax.kernels.manual import vary_alike
from moe_jax.routing import TokenChoice
from moe_jax.routing.token_choice import router_probs
from moe_jax.routing.types import ConstantGateWarning, check_count, check_logits

# Routing has no widths; these are refused by none.
_ANY_WIDTHS = (128, 128)


def fused_router(
    logits: jax.Array,
    k: int,
    *,
    renormalize: bool = False,
    valid: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[TokenChoice, jax.Array, jax.Array]:
    """``softmax_top_k`` with each assignment's position and each expert's count.

    Where a backend has a kernel for it, softmax, top-k, positions and counts are one pass over the
    logits, without the sort that ``dispatch.positions`` needs.

    Args:
      logits: float[T, E]; cast to float32. Equal logits: the lowest index wins. Whom a token with
        a NaN goes to depends on the backend; its gates are NaN.
      k: choices per token, 1 <= k <= E.
      renormalize: divide the k gates by their sum. With k = 1 that makes the gate the constant 1
        and the router gets no gradient from the output, so a warning is given.
      valid: bool[T]; invalid tokens route nowhere. None: all are valid.
      backend: a name of ``BACKENDS``; None: the best for the device.

    Returns:
      The TokenChoice of ``softmax_top_k``, with its gradients; position i32[T, k] as
      ``dispatch.positions`` of priority "arrival" has it, to be handed to ``dispatch.moe``; and
      i32[E], the assignments of each expert.

    Raises:
      ValueError: logits not [T, E], k out of range, valid not [T], a backend that refuses.
    """
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    check_index(logits.shape[0] * k, "assignments T*k")
    chosen = _select(logits, k, backend)
    if renormalize and k == 1:
        warnings.warn(
            "fused_router with k=1 and renormalize: the gate is the constant 1, so the router gets"
            " no gradient through the output; use renormalize=False (Switch).",
            ConstantGateWarning,
            stacklevel=2,
        )
    expert, gate, position, counts = _route(chosen, k, *vary_alike(logits, valid))
    # So that a broken router does not go unseen, whatever a kernel makes of a NaN.
    broken = valid & jnp.any(jnp.isnan(logits), axis=1)
    gate = jnp.where(broken[:, None], jnp.nan, gate)
    if renormalize:
        total = jnp.sum(gate, axis=1, keepdims=True)
        gate = gate / jnp.where(total == 0, 1.0, total)
    return TokenChoice(expert, gate, logits, router_probs(logits, valid)), position, counts


def _select(logits, k, backend):
    """The named backend, else the one with a kernel for the device, else XLA's sort."""
    if backend is not None:
        return api.select(jnp.bfloat16, _ANY_WIDTHS, backend)
    if logits.shape[1] <= MOST_EXPERTS and k <= MOST_CHOICES:
        checked = bool(jax.typeof(logits).mat.varying)  # by jax.shard_map
        for name in ("mosaic_gpu", "pallas_tpu"):
            if api.refusal(name, jnp.bfloat16, _ANY_WIDTHS) is None:
                found = api.load(name)
                if found.typed or not checked:
                    return found
    return api.load("xla_cpu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(backend: Backend, k: int, logits, valid):
    return backend.route(logits, k, valid)


def _route_fwd(backend, k, logits, valid):
    out = backend.route(logits, k, valid)
    return out, (logits, valid, out[0], out[1])


def _route_bwd(backend, k, residuals, cotangents):
    logits, valid, expert, probability = residuals
    # Of p_e = softmax(logits)_e, as in every softmax: p_e (g_e - sum_j g_j p_j).
    weighed = cotangents[1] * probability
    own = jnp.where(expert[..., None] == jnp.arange(logits.shape[1]), weighed[..., None], 0)
    total = jnp.sum(weighed, axis=1, keepdims=True)
    d_logits = jnp.sum(own, axis=1) - router_probs(logits, valid) * total
    return d_logits, np.zeros(valid.shape, jax.dtypes.float0)


_route.defvjp(_route_fwd, _route_bwd)
