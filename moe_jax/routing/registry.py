"""The routers that a config can name. A new router is a file beside this one and a line here."""

import functools
import inspect
from collections.abc import Callable

from moe_jax.routing.token_choice import softmax_top_k, top_k_softmax
from moe_jax.routing.types import TokenChoice

ROUTERS: dict[str, Callable[..., TokenChoice]] = {
    "softmax_top_k": softmax_top_k,
    "top_k_softmax": top_k_softmax,
}


def default_arguments() -> dict[str, dict]:
    """Each router's own arguments with their defaults: {name: {argument: default}}.

    ``k`` and ``valid`` are every router's and are left out.
    """
    return {name: _own_arguments(router) for name, router in ROUTERS.items()}


def make_router(name: str, *, k: int, **arguments) -> Callable[..., TokenChoice]:
    """The router ``name`` with its arguments filled in: call it as router(logits, valid=valid).

    Raises:
      ValueError: a name or an argument that is not in the registry.
    """
    if name not in ROUTERS:
        raise ValueError(f"router: got {name!r}; allowed: {', '.join(sorted(ROUTERS))}")
    allowed = _own_arguments(ROUTERS[name])
    for argument in arguments:
        if argument not in allowed:
            names = ", ".join(allowed) or "none"
            raise ValueError(f"argument of router {name}: got {argument!r}; allowed: {names}")
    return functools.partial(ROUTERS[name], k=k, **arguments)


def _own_arguments(router):
    parameters = inspect.signature(router).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "valid"
    }
