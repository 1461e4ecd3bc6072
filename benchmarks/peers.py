"""Mixture-of-experts blocks of Hugging Face transformers, and torch's dense layers, on CPU.

The experts of transformers are SwiGLU: three matrices. They get ``Shape.swiglu_width``, at which
they cost the FLOPs of our two matrices, and the weights of our own SwiGLU layer, so that both
compute the same function. All blocks share these weights.

Axis legend: T tokens, d width, f expert width, E experts.
"""

import functools
import os

import numpy as np

from benchmarks.layers import SWIGLU_DROPLESS, Output, Timed
from benchmarks.shapes import Inputs, Shape
from benchmarks.timing import Contender, NotMeasured, Program

DENSE, SWIGLU_DENSE = "torch dense", "torch dense SwiGLU"


def experts_implementations() -> list[str]:
    """The values of ``experts_implementation`` that this version of transformers offers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]


def contenders(shape: Shape, inputs: Inputs, timed: Timed) -> list[Contender]:
    """Every block with every implementation, and the dense layers."""
    tensors = functools.cache(functools.partial(_tensors, inputs, timed.dtype))
    found = [
        Contender(DENSE, "torch", lambda: _dense(shape, tensors(), timed, "experts"), DENSE),
        Contender(
            SWIGLU_DENSE,
            "torch",
            lambda: _dense(shape, tensors(), timed, "swiglu"),
            SWIGLU_DENSE,
            swiglu=True,
        ),
    ]
    for block in BLOCKS:
        for implementation in experts_implementations():
            make = functools.partial(_block_program, block, implementation, shape, tensors, timed)
            name = f"{block} {implementation}"
            found.append(
                Contender(name, "transformers", make, SWIGLU_DENSE, True, same_as=SWIGLU_DROPLESS)
            )
    return found


def _mixtral(shape, **fields):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    return MixtralSparseMoeBlock, MixtralConfig(
        intermediate_size=shape.swiglu_width, num_local_experts=shape.experts, **fields
    )


def _olmoe(shape, **fields):
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    return OlmoeSparseMoeBlock, OlmoeConfig(
        intermediate_size=shape.swiglu_width,
        num_experts=shape.experts,
        norm_topk_prob=True,
        **fields,
    )


def _qwen3(shape, **fields):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(
        moe_intermediate_size=shape.swiglu_width,
        num_experts=shape.experts,
        norm_topk_prob=True,
        **fields,
    )


BLOCKS = {"Mixtral": _mixtral, "Olmoe": _olmoe, "Qwen3Moe": _qwen3}


def _tensors(inputs: Inputs, dtype: str) -> dict:
    """The inputs as leaf tensors in the layout of transformers: matrices are [out, in]."""
    import torch

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))

    def transposed(array):
        return tensor(array.swapaxes(-1, -2))

    swiglu = inputs.swiglu
    both = np.concatenate([swiglu["w_gate"], swiglu["w_in"]], axis=2)
    tensors = {
        "x": tensor(inputs.x),
        "router": transposed(inputs.router),
        "gate_up": transposed(both),
        "down": transposed(swiglu["w_out"]),
        "dense_in": transposed(inputs.experts["w_in"][0]),
        "dense_out": transposed(inputs.experts["w_out"][0]),
    }
    leaves = {name: torch.nn.Parameter(value) for name, value in tensors.items()}
    return leaves | {"cotangent": tensor(inputs.cotangent)}


def _block_program(block, implementation, shape, tensors, timed) -> Program:
    """One block of transformers, on [1, T, d]."""
    import torch

    _check_memory(implementation, shape, timed)
    cls, config = BLOCKS[block](
        shape,
        hidden_size=shape.width,
        num_experts_per_tok=shape.k,
        hidden_act="silu",
        experts_implementation=implementation,
    )
    tensors = tensors()
    with torch.device("meta"):  # its own weights are never allocated
        module = cls(config)
    module.gate.weight = tensors["router"]
    module.experts.gate_up_proj = tensors["gate_up"]
    module.experts.down_proj = tensors["down"]
    leaves = [tensors[name] for name in ("x", "router", "gate_up", "down")]

    def forward(x):
        return module(x[None])[0]

    return Program(_runner(forward, leaves, tensors["cotangent"], timed))


def _dense(shape, tensors, timed, kind) -> Program:
    """One feed-forward on T*k rows, with the weights of the first expert for all."""
    import torch
    from torch.nn import functional

    x = tensors["x"].detach().repeat(shape.k, 1).requires_grad_()
    cotangent = tensors["cotangent"].repeat(shape.k, 1)
    if kind == "experts":
        weights = [tensors["dense_in"], tensors["dense_out"]]
    else:
        weights = [torch.nn.Parameter(tensors[name][0].clone()) for name in ("gate_up", "down")]

    def forward(x):
        hidden = functional.linear(x, weights[0])
        if kind == "experts":
            hidden = functional.gelu(hidden, approximate="tanh")
        else:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        return functional.linear(hidden, weights[1])

    return Program(_runner(forward, [x, *weights], cotangent, timed))


def _runner(forward, leaves, cotangent, timed):
    """A function that computes the Output of ``forward`` on the first leaf."""
    import torch

    def run():
        with torch.set_grad_enabled(timed.backward):
            y = forward(leaves[0])
        if not timed.backward:
            return Output(y)
        return Output(y, torch.autograd.grad(y, leaves, cotangent))

    return run


def _check_memory(implementation, shape, timed):
    """batched_mm copies an expert for each assignment, and once more for its gradient."""
    if implementation != "batched_mm":
        return
    number_bytes = 2 if timed.dtype == "bfloat16" else 4
    copies = 3 * shape.width * shape.swiglu_width * shape.assignments * number_bytes
    needed = copies * (2 if timed.backward else 1) / 2**30
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if needed > free / 2:
        raise NotMeasured(
            f"copies an expert for every assignment: {needed:.0f} GiB, of {free:.0f} GiB free"
        )
