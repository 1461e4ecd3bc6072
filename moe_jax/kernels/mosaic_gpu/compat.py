"""What differs between the releases of jax that the Mosaic GPU kernels support.

jax 0.10.2 lowers a kernel per CUDA lane unless told otherwise, and its interpreter of GPU kernels
is private and does not know layouts. Later ones lower per warpgroup, where layouts are inferred,
and have a public interpreter: numbers are checked there, and jax 0.10.2 only compiles. Nor does it
compile a function with a derivative rule of its own, as ``jax.nn.relu`` is one.
"""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")
HAS_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")


def interpreter(interpret):
    """What ``plgpu.kernel`` takes as ``interpret``.

    Args:
      interpret: False compiles; True interprets as strictly as possible: memory starts as NaN and
        a race between threads is an error; anything else goes to jax as it is.

    Raises:
      NotImplementedError: True, and this jax has no interpreter.
    """
    if interpret is not True:
        return interpret
    if not HAS_INTERPRETER:
        raise NotImplementedError("interpret: got True; allowed: False, until jax 0.11.2 or later")
    return plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def kernel(body, *, out_type, scratch_types=(), interpret=False, **grid):
    """``plgpu.kernel`` with warpgroup semantics.

    Args:
      body: of the input, output and scratch refs.
      out_type, scratch_types: as in ``plgpu.kernel``.
      interpret: see ``interpreter``.
      **grid: grid, grid_names, num_threads, thread_name, kernel_name, as in ``plgpu.kernel``.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpreter(interpret),
        **grid,
    )


def inline(function):
    """The function without derivative rules and jit, by primitives alone."""

    def inlined(*args):
        closed = jax.make_jaxpr(function)(*args)
        (out,) = _evaluate(closed, *args)
        return out

    return inlined


def _evaluate(closed, *args):
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, args, strict=True)

    def read(variable):
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in closed.jaxpr.eqns:
        inputs, params = map(read, equation.invars), equation.params
        if equation.primitive.name in _CALLS:
            outputs = _evaluate(params.get("call_jaxpr", params.get("jaxpr")), *inputs)
        else:
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(variable) for variable in closed.jaxpr.outvars]
