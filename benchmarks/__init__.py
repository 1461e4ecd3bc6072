"""Measurements against other implementations. Not part of the package moe_jax."""
