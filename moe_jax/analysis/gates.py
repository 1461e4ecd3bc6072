"""The gates of the routers on the same logits, along a line that crosses a boundary.

Command: python -m moe_jax.analysis.gates --output docs  (a few seconds; gates.png and gates.csv)

Axis legend: n points of the line, T tokens, E experts.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.analysis.plots import Picture, gate_panels
from moe_jax.routing import (
    base_assignment,
    dense_gates,
    expert_choice,
    hash_route,
    merge_weights,
    relu_gate,
    sigmoid_top_k,
    sinkhorn,
    smooth_top_k,
    softmax_top_k,
    top_k_softmax,
    top_p,
)

LOGITS = (2.0, 1.0, 0.7, 0.2, -1.0)
SWEPT = 2
OTHER_TOKENS = 9

# f32[T, E] -> f32[T, E]; of token 0 the logit of expert SWEPT moves.
_METHODS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "top_k_softmax": lambda z: dense_gates(top_k_softmax(z, 2)),
    "softmax_top_k": lambda z: dense_gates(softmax_top_k(z, 2)),
    "temperature_top_k, τ = 1/2": lambda z: dense_gates(softmax_top_k(z / 0.5, 2)),
    "sigmoid_top_k": lambda z: dense_gates(sigmoid_top_k(z, 2)),
    "smooth_top_k, ε = 1": lambda z: dense_gates(smooth_top_k(z, 2, 1.0)),
    "relu_gate": lambda z: dense_gates(relu_gate(z)),
    "top_p, mass 0.7": lambda z: dense_gates(top_p(z, 0.7)),
    "hash": lambda z: dense_gates(hash_route(jnp.arange(len(z)), z.shape[1], 2)),
    "base_assignment": lambda z: dense_gates(base_assignment(z)),
    "sinkhorn": lambda z: dense_gates(sinkhorn(z, 2)),
    "expert_choice": lambda z: dense_gates(expert_choice(z, 4)),
    "smear": lambda z: jnp.broadcast_to(merge_weights(z).weight, z.shape),
}


def gate_curves(num_points: int = 401) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The gates of a token while one of its logits rises past the others.

    The token has the logits 2, 1, z, 0.2, -1 and k = 2. The methods that choose for a whole batch
    see nine more tokens, which stay as they are.

    Args:
      num_points: n, values of z from -1.5 to 3.5.

    Returns:
      The values of z float[n], and the gates float[n, E] by method; of SMEAR the weights of the
      experts in the merged one.
    """
    swept = jnp.linspace(-1.5, 3.5, num_points)
    others = jax.random.normal(jax.random.key(0), (OTHER_TOKENS, len(LOGITS)))

    def batch(z):
        return jnp.concatenate([jnp.array(LOGITS).at[SWEPT].set(z)[None], others])

    def along(method):
        return np.asarray(jax.jit(lambda zs: jax.lax.map(lambda z: method(batch(z))[0], zs))(swept))

    return np.asarray(swept), {name: along(method) for name, method in _METHODS.items()}


def draw_gates(directory: Path) -> Picture:
    """Writes gates.png and gates.csv into ``directory``."""
    swept, curves = gate_curves()
    return gate_panels(swept, curves, directory, moving=SWEPT, boundary=sorted(LOGITS)[-2])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m moe_jax.analysis.gates",
        description="Draws the gates of the routers on the same logits.",
        epilog="example: python -m moe_jax.analysis.gates --output docs",
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the picture")
    print(*draw_gates(parser.parse_args().output), sep="\n")
