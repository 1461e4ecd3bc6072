"""Parameters and FLOPs by hand, and against the products in the traced program."""

import math

import jax
import numpy as np
import pytest

from moe_jax.layers import Mlp, MoE
from moe_jax.models import (
    ForwardFlops,
    LanguageModel,
    ParameterCount,
    count_parameters,
    forward_flops_per_token,
)
from moe_jax.routing import make_router

# V=10, d=4, H=2, S=6; dense width 16; E=8 experts of width 8, k=2.
TOKENS = np.zeros((2, 6), np.int32)


def moe(glu=False, use_bias=False, shared=0):
    method = make_router("softmax_top_k", k=2)
    # Factor 1 with the sorted dispatcher: E * C = k * T rows, what k experts per token come to.
    return MoE(
        8,
        8,
        method,
        glu=glu,
        use_bias=use_bias,
        num_shared_experts=shared,
        implementation="sorted",
        capacity_factor=1.0,
    )


def model(**fields):
    sizes = dict(vocab_size=10, width=4, num_layers=2, num_heads=2, dense=lambda: Mlp(16))
    return LanguageModel(**(sizes | fields))


def shapes(lm):
    return jax.eval_shape(lm.init, jax.random.key(0), TOKENS)["params"]


def test_dense_model_by_hand():
    params = shapes(model())
    # embedding 10*4; per layer: attention 4*(4*4), norms 2*4, network 2*(4*16); final norm 4.
    total = 40 + 2 * (64 + 8 + 128) + 4
    assert count_parameters(params, k=0) == ParameterCount(total, total)
    assert forward_flops_per_token(params, k=0, sequence_length=6) == ForwardFlops(
        attention_projections=2 * 2 * 64,  # 2 layers, 2 operations per weight
        attention_scores=2 * (2 * 6 * 4 + 2 * 6 * 4),  # q·k and p·v: 6 positions, 4 features
        feed_forward=2 * 2 * 128,
        router=0,
        head=2 * 40,
    )


def test_expert_model_by_hand():
    params = shapes(model(moe=moe, moe_every=2))
    # One dense layer as above; the other: router 4*8, one expert 2*(4*8) = 64.
    shared_by_all = 40 + 2 * (64 + 8) + 128 + 32 + 4
    assert count_parameters(params, k=2) == (shared_by_all + 8 * 64, shared_by_all + 2 * 64)
    flops = forward_flops_per_token(params, k=2, sequence_length=6)
    assert flops.router == 2 * 32
    assert flops.feed_forward == 2 * 128 + 2 * 2 * 64
    # k=2 experts of width 8 are as much work as a dense width of 16: the dense model and a router.
    dense = forward_flops_per_token(shapes(model()), k=0, sequence_length=6)
    assert flops.total - dense.total == 2 * 32
    assert flops.total == sum([256, 192, 512, 64, 80])


def test_glu_biases_and_shared_experts_by_hand():
    params = shapes(model(num_layers=1, moe=lambda: moe(True, True, 1)))
    # An expert: 3 matrices of 4*8, biases 8 + 4. The shared expert is one more, always active.
    expert = 3 * 32 + 12
    others = 40 + 64 + 8 + 32 + 4 + expert
    assert count_parameters(params, k=2) == (others + 8 * expert, others + 2 * expert)
    flops = forward_flops_per_token(params, k=2, sequence_length=6)
    assert flops.feed_forward == 2 * (2 + 1) * 3 * 32


def test_an_untied_head_is_a_matrix_and_the_embedding_no_work():
    tied, untied = shapes(model()), shapes(model(tie_embeddings=False))
    assert count_parameters(untied, 0).total == count_parameters(tied, 0).total + 40
    assert forward_flops_per_token(untied, 0, 6) == forward_flops_per_token(tied, 0, 6)


def test_scanned_layers_count_the_same():
    fields = dict(num_layers=4, moe=lambda: moe(True, True, 1), moe_every=2)
    plain, scanned = shapes(model(**fields)), shapes(model(**fields, scan_layers=True))
    assert count_parameters(scanned, 2) == count_parameters(plain, 2)
    assert forward_flops_per_token(scanned, 2, 6) == forward_flops_per_token(plain, 2, 6)


def products(jaxpr):
    """Reference: floating-point operations of every dot_general of a traced program."""
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            lhs = equation.invars[0].aval.shape
            summed = math.prod(lhs[axis] for axis in contracted)
            flops += 2 * summed * math.prod(equation.outvars[0].aval.shape)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)  # closed or open
            if hasattr(inner, "eqns"):
                flops += products(inner)
    return flops


FIELDS = {
    "dense": {},
    "untied": dict(tie_embeddings=False),
    "experts": dict(num_layers=3, moe=lambda: moe(True, True, 2), moe_every=3),
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_flops_are_those_of_the_traced_program(fields):
    lm = model(**fields)
    params = shapes(lm)
    traced = jax.make_jaxpr(lambda p: lm.apply({"params": p}, TOKENS))(params)
    total = forward_flops_per_token(params, k=2, sequence_length=TOKENS.shape[1]).total
    assert products(traced.jaxpr) == TOKENS.size * total


@pytest.mark.parametrize("k", [-1, 9])
def test_k_out_of_range_is_refused(k):
    params = shapes(model(moe=moe))
    for count in (count_parameters, lambda p, k: forward_flops_per_token(p, k, 6)):
        with pytest.raises(ValueError, match=f"k: got {k}; allowed: 0..8"):
            count(params, k)


def test_a_number_of_experts_that_varies():
    """Smooth and ReLU gates have so many experts per token on average."""
    params = shapes(model(moe=moe))
    two, three = (count_parameters(params, k).active for k in (2, 3))
    assert count_parameters(params, 2.5).active == (two + three) / 2
    flops = [forward_flops_per_token(params, k, 6).feed_forward for k in (2, 2.5, 3)]
    assert flops[1] == (flops[0] + flops[2]) / 2
    assert forward_flops_per_token(params, 0, 6).feed_forward == 0
