"""Certificates, statistics, baselines and plots; nothing else in the package imports it."""

from moe_jax.analysis.certificates import certified_radius, exact_radius, gate_lipschitz
from moe_jax.analysis.load import expected_drop_fraction

__all__ = ["certified_radius", "exact_radius", "expected_drop_fraction", "gate_lipschitz"]
