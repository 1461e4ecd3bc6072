"""Training: python -m moe_jax.train."""
