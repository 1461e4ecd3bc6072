"""The expert's arithmetic, which every dispatcher shares.

Axis legend: E experts, n rows, d width, f expert width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = str | Callable[[jax.Array], jax.Array]


def activation_function(activation: Activation) -> Callable[[jax.Array], jax.Array]:
    """The activation itself, or the function of jax.nn with that name, with its defaults.

    Raises:
      ValueError: jax.nn has no function of that name, or it does not keep the shape.
    """
    function = activation
    if isinstance(activation, str):
        function = getattr(jax.nn, activation, None)
    if not (callable(function) and _keeps_shape(function)):
        raise ValueError(
            f"activation: got {activation!r}; allowed: an elementwise function of one array, or the"
            " name of one in jax.nn such as 'gelu', 'relu', 'silu'"
        )
    return function


def _keeps_shape(function):
    """Whether it makes of one array another of its shape, as what is elementwise does."""
    example = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    try:
        return jax.eval_shape(function, example).shape == example.shape
    except (TypeError, AttributeError):  # more arguments, or no array
        return False


def check_experts(experts: dict, width: int) -> tuple[int, int, int]:
    """E, d and f of the expert weights.

    Args:
      experts: {"w_in": [E, d, f], "w_out": [E, f, d]}, optional "w_gate" [E, d, f] (GLU),
        "b_in" [E, f], "b_out" [E, d].
      width: d of the tokens.

    Raises:
      ValueError: missing or unknown weights, shapes that do not fit.
    """
    allowed = ("w_in", "w_gate", "w_out", "b_in", "b_out")
    unknown = sorted(set(experts) - set(allowed))
    missing = sorted({"w_in", "w_out"} - set(experts))
    if unknown or missing:
        raise ValueError(
            f"experts: got {sorted(experts)}; allowed: {', '.join(allowed)}, of which w_in and"
            " w_out must be there"
        )
    if experts["w_in"].ndim != 3:
        raise ValueError(f"experts.w_in: got shape {experts['w_in'].shape}; allowed: [E, d, f]")
    e, d, f = experts["w_in"].shape
    shapes = dict(w_in=(e, width, f), w_gate=(e, width, f), w_out=(e, f, width))
    shapes |= dict(b_in=(e, f), b_out=(e, width))
    for name, weight in experts.items():
        if weight.shape != shapes[name]:
            raise ValueError(f"experts.{name}: got shape {weight.shape}; allowed: {shapes[name]}")
    return e, d, f


def feed_forward(
    x: jax.Array,
    experts: dict,
    activation: Callable[[jax.Array], jax.Array],
    matmul: Callable[[jax.Array, jax.Array], jax.Array],
    bias: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """w_out activation(w_in x + b_in) + b_out; with w_gate activation(w_gate x) (w_in x + b_in).

    Args:
      x: rows, laid out as the dispatcher likes.
      experts: the weights, see check_experts.
      activation: elementwise.
      matmul: (rows, weight [E, a, b]) -> rows; multiplies each row by its expert's matrix.
      bias: (bias [E, a]) -> its expert's bias for each row, broadcastable to the rows.

    Returns:
      The experts' outputs in the layout of x.
    """
    hidden = matmul(x, experts["w_in"])
    if "b_in" in experts:
        hidden = hidden + bias(experts["b_in"])
    if "w_gate" in experts:
        hidden = activation(matmul(x, experts["w_gate"])) * hidden
    else:
        hidden = activation(hidden)
    out = matmul(hidden, experts["w_out"])
    return out + bias(experts["b_out"]) if "b_out" in experts else out
