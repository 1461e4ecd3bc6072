"""Checkpoints of a run: written in the background, whole or not at all, checked when read."""

from moe_jax.checkpoints.files import CheckpointError, saved_steps, set_aside_damaged
from moe_jax.checkpoints.manager import (
    Checkpoints,
    best_step,
    restore_trees,
    saved_arrays,
    validation_cross_entropy,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "best_step",
    "restore_trees",
    "saved_arrays",
    "saved_steps",
    "set_aside_damaged",
    "validation_cross_entropy",
]
