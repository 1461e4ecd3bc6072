"""The routers that a config can name. A new router is a file beside this one and a line here."""

import inspect
from collections.abc import Callable
from typing import Any

from moe_jax.routing.assignment import BaseAssignment, Sinkhorn
from moe_jax.routing.cosine import CosineTopK
from moe_jax.routing.expert_choice import ExpertChoiceRouter
from moe_jax.routing.hashing import HashRoute
from moe_jax.routing.perturb import NoisyTopK
from moe_jax.routing.relu import ReluGate
from moe_jax.routing.router import LogitsRouter, Router
from moe_jax.routing.sigmoid import SigmoidTopK
from moe_jax.routing.smooth import SmoothTopK
from moe_jax.routing.soft import Smear, SoftMoE
from moe_jax.routing.temperature import ScheduledTopK, TemperatureTopK
from moe_jax.routing.token_choice import softmax_top_k, top_k_softmax
from moe_jax.routing.top_p import TopP

# A Router, or a function (logits, k, *, valid, ...) -> TokenChoice, which needs nothing else.
ROUTERS: dict[str, Callable[..., Any]] = {
    "base_assignment": BaseAssignment,
    "cosine_top_k": CosineTopK,
    "expert_choice": ExpertChoiceRouter,
    "hash": HashRoute,
    "noisy_top_k": NoisyTopK,
    "relu_gate": ReluGate,
    "scheduled_top_k": ScheduledTopK,
    "sigmoid_top_k": SigmoidTopK,
    "sinkhorn": Sinkhorn,
    "smear": Smear,
    "smooth_top_k": SmoothTopK,
    "soft_moe": SoftMoE,
    "softmax_top_k": softmax_top_k,
    "temperature_top_k": TemperatureTopK,
    "top_k_softmax": top_k_softmax,
    "top_p": TopP,
}


def default_arguments() -> dict[str, dict]:
    """Each router's own arguments with their defaults: {name: {argument: default}}.

    ``k``, ``valid`` and ``chosen`` are every router's and are left out. A default of None stands
    for an optional whole number.
    """
    return {name: _own_arguments(router) for name, router in ROUTERS.items()}


def make_router(name: str, *, k: int, **arguments) -> Router:
    """The router ``name`` with its arguments filled in.

    One that is a function of logits can be called as that: router(logits, valid=valid).

    Raises:
      ValueError: a name or an argument that is not in the registry.
    """
    if name not in ROUTERS:
        raise ValueError(f"router: got {name!r}; allowed: {', '.join(sorted(ROUTERS))}")
    method = ROUTERS[name]
    allowed = _own_arguments(method)
    for argument in arguments:
        if argument not in allowed:
            names = ", ".join(allowed) or "none"
            raise ValueError(f"argument of router {name}: got {argument!r}; allowed: {names}")
    if isinstance(method, type):
        return method(k=k, **arguments)
    return LogitsRouter(k=k, method=method, arguments=tuple(sorted(arguments.items())))


def _own_arguments(router):
    parameters = inspect.signature(router).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("k", "valid", "chosen")
    }
