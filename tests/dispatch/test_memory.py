"""What the dispatchers need for the time of a call, as the compiler plans it."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.dispatch import capacity, moe
from moe_jax.routing import softmax_top_k


@pytest.mark.parametrize("implementation", ["dropless", "sorted"])
def test_temporaries_do_not_grow_with_the_number_of_experts(implementation):
    # T*k stays at 1024 rows. The gradients of the weights are outputs, not temporaries.
    def temporary_bytes(num_experts):
        limit = None if implementation == "dropless" else capacity(512, num_experts, 2, 1.25)
        how = dict(implementation=implementation, capacity=limit)

        def loss(x, router, w_in, w_out):
            y, _ = moe(x, softmax_top_k(x @ router, 2), {"w_in": w_in, "w_out": w_out}, **how)
            return jnp.sum(y**2)

        d, f = 32, 64
        shapes = [(512, d), (d, num_experts), (num_experts, d, f), (num_experts, f, d)]
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(4), temporary_bytes(64)
    # Router logits and probabilities, [T, E], are all that may grow.
    assert many <= few + 4 * 512 * 64 * 4, (few, many)
