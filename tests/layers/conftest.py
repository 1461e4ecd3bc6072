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
    """random_params(init, *inputs): normal values of 1/2 in the shapes that init(key, ...) has.

    No bias is 0, so that a forgotten one shows.
    """

    def make(init, *inputs):
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
        return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 2, s.dtype), shapes)

    return make
