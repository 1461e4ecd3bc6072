"""What JAX contributes to the comparison of layers: ours, the dense limit, and ragged_dot.

Axis legend: T tokens, d width, f expert width, E experts, k choices, R = T*k rows.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import Inputs, Shape
from benchmarks.timing import Contender, NotMeasured, Program
from moe_jax import dispatch
from moe_jax.kernels import fused_router
from moe_jax.routing import expert_counts, softmax_top_k

CAPACITY_FACTOR = 1.25
GROUP = 512
# One group of all T tokens costs T*E*C and is for small T only.
_ONE_GROUP_TOKENS = 1024

DENSE, SWIGLU_DENSE = "dense", "dense SwiGLU"
FLOOR = "batched matmul, no routing"
DROPLESS, SWIGLU_DROPLESS = "dropless", "dropless SwiGLU"


class Output(NamedTuple):
    """What every contender computes.

    Attributes:
      y: its output.
      gradients: in its input and all its weights; None if only the forward pass was asked for.
      dropped: assignments dropped for want of capacity; None where that does not apply.
    """

    y: Any
    gradients: Any = None
    dropped: Any = None


class Timed(NamedTuple):
    """Settings that all contenders of one comparison share."""

    dtype: str
    backward: bool
    calls: int = 1


def contenders(shape: Shape, inputs: Inputs, timed: Timed) -> list[Contender]:
    """All contenders of this library; the first is the dense layer that the ratios refer to."""
    arrays = _Arrays(inputs, timed.dtype)

    def add(name, layer, arguments, *, own_dense=DENSE, swiglu=False, same_as=""):
        make = functools.partial(_compile, layer, arguments, timed)
        found.append(Contender(name, "jax", make, own_dense, swiglu, same_as))

    found: list[Contender] = []
    moe = functools.partial(moe_layer, k=shape.k)
    add(DENSE, dense_layer, lambda: arrays.dense(shape, "gelu"))
    add(FLOOR, dense_layer, lambda: arrays.even(shape))
    add(DROPLESS, functools.partial(moe), arrays.gelu, same_as=DROPLESS)
    limited = functools.partial(moe, capacity_factor=CAPACITY_FACTOR)
    add("sorted, capacity 1.25", functools.partial(limited, implementation="sorted"), arrays.gelu)
    einsum = functools.partial(limited, implementation="einsum")
    group = min(GROUP, shape.tokens)
    add(f"einsum in groups of {group}", functools.partial(einsum, group=group), arrays.gelu)
    if GROUP < shape.tokens <= _ONE_GROUP_TOKENS:
        add("einsum in one group", einsum, arrays.gelu)
    own = dict(own_dense=SWIGLU_DENSE, swiglu=True)
    add(SWIGLU_DENSE, dense_layer, lambda: arrays.dense(shape, "silu"), **own)
    silu = functools.partial(moe, activation="silu")
    add(SWIGLU_DROPLESS, silu, arrays.swiglu, **own, same_as=SWIGLU_DROPLESS)
    if jax.default_backend() != "cpu":
        tokamax = functools.partial(ragged_dot_layer, k=shape.k)
        add("tokamax.ragged_dot", tokamax, arrays.gelu, same_as=DROPLESS)
    return found


def without(words: Sequence[str], contenders: Sequence[Contender]) -> list[Contender]:
    """Those whose names have none of the words, and the dense layers they are compared with."""
    left = [c for c in contenders if not any(word in c.name for word in words)]
    names = {DENSE} | {name for c in left for name in (c.name, c.own_dense)}
    return [contender for contender in contenders if contender.name in names]


def route(x: jax.Array, router: jax.Array, k: int, method=softmax_top_k):
    """softmax_top_k of float32 logits, renormalised as in Mixtral unless that is constant."""
    return method(x.astype(jnp.float32) @ router, k, renormalize=k > 1)


def moe_layer(
    x: jax.Array,
    router: jax.Array,
    experts: dict[str, jax.Array],
    *,
    k: int,
    implementation: str = "dropless",
    capacity_factor: float | None = None,
    group: int | None = None,
    activation: str = "gelu",
) -> tuple[jax.Array, jax.Array]:
    """Router, dispatch, experts, combine, as ``moe_jax.layers.MoE`` puts them together.

    Args:
      x: [T, d].  router: f32[d, E].  experts: as ``moe_jax.dispatch.moe`` takes them.
      k, implementation, activation: likewise.
      capacity_factor: of a group; None: nobody is dropped.
      group: tokens that share the capacity, a divisor of T, for einsum; None: all of them.

    Returns:
      y [T, d], and i32[], how many assignments were dropped.
    """
    position = None
    if implementation == "einsum":
        routing = route(x, router, k)
    else:
        routing, position, _ = route(x, router, k, fused_router)
    group = group or len(x)
    capacity = None
    if capacity_factor is not None:
        capacity = dispatch.capacity(group, router.shape[1], k, capacity_factor)

    def one_group(x, routing):
        return dispatch.moe(
            x,
            routing,
            experts,
            implementation=implementation,
            capacity=capacity,
            activation=activation,
            position=position,
        )

    if group == len(x):
        y, dropped = one_group(x, routing)
    else:
        parts = jax.tree.map(lambda a: a.reshape(-1, group, *a.shape[1:]), (x, routing))
        y, dropped = jax.vmap(one_group)(*parts)
    return y.reshape(x.shape), jnp.sum(dropped)


def dense_layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Feed-forward of x [..., R, d] with weights [..., d, f], one expert if without leading axis.

    GELU, or SwiGLU with "w_gate".
    """
    hidden = x @ weights["w_in"]
    if "w_gate" in weights:
        hidden = jax.nn.silu(x @ weights["w_gate"]) * hidden
    else:
        hidden = jax.nn.gelu(hidden)
    return hidden @ weights["w_out"], None


def ragged_dot_layer(x, router, experts, *, k):
    """The layer as one writes it with tokamax: sort, ragged_dot twice, weighted sum per token."""
    tokamax = _import_tokamax()
    routing = route(x, router, k)
    expert, gate = routing.expert.ravel(), routing.gate.ravel()
    order = jnp.argsort(expert, stable=True)
    sizes = expert_counts(routing.expert, router.shape[1])
    hidden = jax.nn.gelu(tokamax.ragged_dot(x[order // k], experts["w_in"], sizes))
    rows = tokamax.ragged_dot(hidden, experts["w_out"], sizes) * gate[order, None]
    y = jax.ops.segment_sum(rows, order // k, num_segments=len(x))
    return y.astype(x.dtype), None


def _import_tokamax():
    if importlib.util.find_spec("tokamax") is None:
        raise NotMeasured("tokamax is not installed")
    import tokamax

    return tokamax


class _Arrays:
    """The inputs on the device, made when first asked for and shared by the contenders."""

    def __init__(self, inputs: Inputs, dtype: str):
        self._inputs, self._dtype = inputs, jnp.dtype(dtype)
        self._made: dict[str, Any] = {}

    def _get(self, name):
        if name not in self._made:
            value = getattr(self._inputs, name)
            # Router weights are float32, as everywhere in this library.
            dtype = jnp.float32 if name == "router" else self._dtype
            self._made[name] = jax.tree.map(lambda a: jnp.asarray(a, dtype), value)
        return self._made[name]

    def gelu(self):
        """(cotangent, (x, router, experts)) of two matrices."""
        return self._get("cotangent"), (self._get("x"), self._get("router"), self._get("experts"))

    def swiglu(self):
        """Likewise of three."""
        return self._get("cotangent"), (self._get("x"), self._get("router"), self._get("swiglu"))

    def dense(self, shape, activation):
        """R rows for the first expert alone."""
        experts = self._get("experts" if activation == "gelu" else "swiglu")
        repeat = functools.partial(jnp.tile, reps=(shape.k, 1))
        weights = {name: weight[0] for name, weight in experts.items()}
        return repeat(self._get("cotangent")), (repeat(self._get("x")), weights)

    def even(self, shape):
        """R / E rows for every expert, already in place."""
        if shape.assignments % shape.experts:
            raise NotMeasured("T*k is no multiple of E")
        cotangent, (x, _) = self.dense(shape, "gelu")
        fold = (shape.experts, -1, shape.width)
        return cotangent.reshape(fold), (x.reshape(fold), self._get("experts"))


def _compile(layer: Callable, arguments: Callable, timed: Timed) -> Program:
    cotangent, arguments = arguments()

    def forward(cotangent, *arguments):
        y, dropped = layer(*arguments)
        return Output(y, dropped=dropped)

    def forward_backward(cotangent, *arguments):
        y, pull_back, dropped = jax.vjp(layer, *arguments, has_aux=True)
        return Output(y, pull_back(cotangent), dropped)

    start = time.perf_counter()
    function = jax.jit(forward_backward if timed.backward else forward)
    compiled = function.lower(cotangent, *arguments).compile()
    seconds = time.perf_counter() - start

    def run():
        # An accelerator works through a queue; only the last outputs of it are held.
        for _ in range(timed.calls):
            output = compiled(cotangent, *arguments)
        return jax.block_until_ready(output)

    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return Program(run, timed.calls, temp_bytes, seconds)


def look(output: Output) -> tuple[np.ndarray, int | None]:
    """y as a float32 array and the dropped assignments, of an output of any contender."""
    y = output.y
    if not isinstance(y, jax.Array):
        y = y.detach().float().numpy()
    dropped = None if output.dropped is None else int(output.dropped)
    return np.asarray(y, np.float32), dropped
