"""Parameters without the random initialisers, which take a second each to compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_once(quick_compilation):
    """For every test of this folder."""


@pytest.fixture(scope="session")
def random_params():
    """random_params(model, tokens): normal values of 1/3 in the shapes that init would give."""

    def make(model, tokens):
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
        return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype), shapes)

    return make
