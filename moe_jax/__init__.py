"""moe_jax: sparse mixture-of-experts routing, dispatch, training and analysis in JAX."""

__version__ = "0.1.0"
