"""The routers of a model: their variables stacked over layers, and a choice that is run again.

Variables of a LanguageModel are nested dicts in which every router has a subtree named "router".
Scanned layers hold it once, with a leading axis of layers; the others once per block.

Axes: L layers with experts, T tokens, K slots, E experts, C capacity.
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.layers import RoutingInfo
from moe_jax.routing import ExpertChoice, TokenChoice
from moe_jax.untrusted import load_npz

_NAME = "router"


def stack_routers(tree: dict) -> dict:
    """The routers' subtrees of ``tree`` as one, every array with a leading axis L.

    Args:
      tree: one collection of variables of a model, such as its parameters; {} gives {}.
    """
    found = _routers(tree)
    if not found:
        return {}
    if "scanned_blocks" in tree:
        return found[0][1]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(router for _, router in found))


def unstack_routers(stacked: dict, like: dict) -> dict:
    """The inverse of ``stack_routers``: a tree of the layout of ``like`` with the routers alone.

    Args:
      stacked: the subtree of a router, every array with a leading axis L.
      like: a collection of variables of the model, for its layout.
    """
    found = _routers(like)
    scanned = "scanned_blocks" in like
    tree: dict[str, Any] = {}
    for layer, (path, _) in enumerate(found):
        router = stacked if scanned else jax.tree.map(lambda x: x[layer], stacked)  # noqa: B023
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = router
    return tree


def record_choice(info: RoutingInfo) -> jax.Array:
    """The discrete choice of every layer, to be stored or run again.

    Args:
      info: of a model, with a leading axis L.

    Returns:
      i32[L, T, K], the experts of each token, or i32[L, E, C], the tokens of each expert.

    Raises:
      ValueError: the routing makes no discrete choice.
    """
    if isinstance(info.routing, TokenChoice):
        return info.routing.expert
    if isinstance(info.routing, ExpertChoice):
        return info.routing.token
    name = type(info.routing).__name__
    raise ValueError(f"info.routing: got {name}; allowed: TokenChoice, ExpertChoice")


def replay_choice(variables: dict, chosen: jax.Array) -> dict:
    """Variables with which a model repeats a stored choice, its gates computed anew.

    What then differs between two runs, in dtype, kernel or checkpoint, does so for other reasons
    than a flipped choice:

      logits, info = model.apply(replay_choice(variables, record_choice(other_info)), tokens)

    Args:
      variables: {"params": ..., perhaps "router_state": ...} of the model that is to repeat it.
      chosen: of ``record_choice``, for the same number of tokens and layers.

    Raises:
      ValueError: ``chosen`` has another number of layers than the model.
    """
    # A router learns something or carries something, so one of the two has a place for each.
    collections = [variables["params"], variables.get("router_state", {})]
    like = next((tree for tree in collections if _routers(tree)), {})
    layers = len(jax.tree.leaves(stack_routers(like))[0]) if like else 0
    if chosen.ndim != 3 or chosen.shape[0] != layers:
        raise ValueError(f"chosen: got shape {chosen.shape}; allowed: [{layers}, ...], as layers")
    return variables | {"replay": unstack_routers({"chosen": chosen}, like)}


def changed_sets(before: jax.Array, after: jax.Array, num_experts: int) -> np.ndarray:
    """Which tokens have another set of experts in two recorded choices.

    Args:
      before, after: i32[L, T, K] and i32[L, T, K'], of ``record_choice``.
      num_experts: E.

    Returns:
      bool[L, T]. Its mean over tokens is the churn between two checkpoints, or the share of tokens
      that a change of dtype flips.
    """
    sets = [
        jax.nn.one_hot(chosen, num_experts, dtype=bool).any(axis=-2) for chosen in (before, after)
    ]
    return np.asarray((sets[0] != sets[1]).any(axis=-1))


def save_choice(path: str | Path, tokens: np.ndarray, chosen: jax.Array) -> None:
    """Writes a recorded choice with the batch it is of, as npz.

    Args:
      path: of the file.
      tokens: int[B, S], the batch.
      chosen: of ``record_choice``.
    """
    with open(path, "wb") as file:
        np.savez_compressed(file, tokens=np.asarray(tokens), chosen=np.asarray(chosen))


def load_choice(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and the choice that ``save_choice`` wrote.

    Raises:
      ValueError: the file is not one of these.
    """
    try:
        arrays = load_npz(path, ("tokens", "chosen"))
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"{name} is {array.dtype}")
        return arrays["tokens"], arrays["chosen"]
    except ValueError as error:
        raise ValueError(f"{path}: got no recorded choice ({error}); allowed: npz") from None


def _routers(tree, path=()):
    """(path, subtree) of every router, in the order of the blocks."""
    found = []
    for name in sorted(tree, key=_natural):
        if name == _NAME:
            found.append(((*path, name), tree[name]))
        elif isinstance(tree[name], dict):
            found += _routers(tree[name], (*path, name))
    return found


def _natural(name):
    """block_10 after block_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
