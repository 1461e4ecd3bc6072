"""Parameters of a model with scanned layers from those of one without, and back.

Without: {"blocks": {"block_0": tree, ..., "block_{L-1}": tree}}. Scanned: {"scanned_blocks":
{"block_0": tree, ..., "block_{n-1}": tree}} with arrays [G, ...], where the L = G n layers are G
groups of n and block_i of group g is layer g n + i.
"""

import jax
import jax.numpy as jnp


def stack_layers(params: dict) -> dict:
    """Parameters for ``scan_layers=True`` from those for ``scan_layers=False``.

    The group is the shortest one that repeats through the layers: layers are alike when their
    trees and the shapes in them are, so a dense layer and one with experts always differ.

    Args:
      params: nested dict with the key "blocks"; other keys are kept. Any tree of that layout will
        do, such as gradients or the moments of an optimizer.

    Raises:
      ValueError: there is no "blocks".
    """
    layers = _blocks(params, "blocks")
    size = _group_size(layers)
    stacked = {f"block_{i}": _stack(layers[i::size]) for i in range(size)}
    return _without(params, "blocks") | {"scanned_blocks": stacked}


def unstack_layers(params: dict) -> dict:
    """The inverse of ``stack_layers``.

    Raises:
      ValueError: there is no "scanned_blocks".
    """
    group = _blocks(params, "scanned_blocks")
    num_groups = jax.tree.leaves(group)[0].shape[0]
    layers = [_take(tree, g) for g in range(num_groups) for tree in group]
    blocks = {f"block_{i}": tree for i, tree in enumerate(layers)}
    return _without(params, "scanned_blocks") | {"blocks": blocks}


def _blocks(params, name):
    """The trees of block_0, block_1, ... in order."""
    if name not in params:
        raise ValueError(f"params: got the keys {sorted(params)}; allowed: with {name!r}")
    return [params[name][f"block_{i}"] for i in range(len(params[name]))]


def _group_size(layers):
    kinds = [jax.tree.map(jnp.shape, tree) for tree in layers]
    sizes = (n for n in range(1, len(layers) + 1) if len(layers) % n == 0)
    return next(n for n in sizes if kinds[n:] == kinds[:-n])


def _stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _take(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _without(params, name):
    return {key: tree for key, tree in params.items() if key != name}
