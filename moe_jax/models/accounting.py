"""What a language model costs: parameters and arithmetic, in total and per token.

Both are read off the parameters of a LanguageModel, scanned or not, so they hold for the model as
it is. Shapes are enough: the result of ``jax.eval_shape`` will do.

Axes: E experts, k choices, S sequence.
"""

from typing import NamedTuple

import jax

_ROUTER_MATRICES = ("kernel", "projection", "expert_embedding", "slots")


class ParameterCount(NamedTuple):
    """Numbers of parameters.

    Attributes:
      total: all of them.
      active: those that one token uses: k of the E experts of each layer and everything that is
        no expert, embedding and shared experts included.
    """

    total: int
    active: int


class ForwardFlops(NamedTuple):
    """Floating-point operations per token of the forward pass, counting matrix products only.

    A row times a matrix [m, n] is 2mn operations. Attributes, each summed over the layers:
      attention_projections: query, key, value and output.
      attention_scores: queries with keys and probabilities with values over all S positions, since
        the masked half of the causal square is computed too.
      feed_forward: dense feed-forward networks, k experts per token, shared experts. Dropped tokens
        and empty capacity do not change it.
      router: router logits.
      head: output logits.
    """

    attention_projections: int
    attention_scores: int
    feed_forward: int
    router: int
    head: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self)


def count_parameters(params: dict, k: float) -> ParameterCount:
    """Counts all parameters, and those that one token uses.

    Args:
      params: nested dict of arrays or shapes.
      k: experts per token, on average where it varies; anything if there are no experts.

    Raises:
      ValueError: there are experts and k is not in [0, E].
    """
    leaves = _leaves(params)
    total = sum(leaf.size for _, leaf in leaves)
    return ParameterCount(total, sum(_active_size(path, leaf, k) for path, leaf in leaves))


def forward_flops_per_token(params: dict, k: float, sequence_length: int) -> ForwardFlops:
    """Arithmetic of the forward pass per token.

    Args:
      params: nested dict of arrays or shapes of a LanguageModel.
      k: experts per token, on average where it varies; anything if there are no experts.
      sequence_length: S.

    Raises:
      ValueError: there are experts and k is not in [0, E].
    """
    flops = dict.fromkeys(ForwardFlops._fields, 0)
    for path, leaf in _leaves(params):
        part = _part(path, tied="head" not in params)
        if part:
            flops[part] += 2 * _active_size(path, leaf, k)
        if path[-2:] == ("query", "kernel"):
            flops["attention_scores"] += 2 * 2 * sequence_length * leaf.size // leaf.shape[-2]
    return ForwardFlops(**flops)


def _part(path, tied):
    """The field of ForwardFlops that this array's matrix product counts in, if it has one."""
    if "router" in path:  # without the noise, which evaluation does not compute
        return "router" if path[-1] in _ROUTER_MATRICES else None
    if path[-1] == "embedding":
        return "head" if tied else None  # looking a row up is no arithmetic
    if path[-1] not in ("kernel", "w_in", "w_gate", "w_out"):
        return None
    if "attention" in path:
        return "attention_projections"
    return "feed_forward" if "feed_forward" in path else "head"


def _active_size(path, leaf, k):
    """Size of an array, of which only k of E experts count."""
    if "experts" not in path:
        return leaf.size
    # From the right, since scanned layers add an axis on the left.
    num_experts = leaf.shape[-3] if path[-1].startswith("w_") else leaf.shape[-2]
    if not 0 <= k <= num_experts:
        raise ValueError(f"k: got {k}; allowed: 0..{num_experts} (the number of experts)")
    return round(leaf.size / num_experts * k)


def _leaves(params):
    """(names on the way, array) of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(tuple(key.key for key in path), leaf) for path, leaf in leaves]
