"""AdamW with warmup and cosine decay; weight decay on matrices only."""

import jax
import optax

# By name and not by the number of axes: a bias of E experts is [E, f], and a scale of scanned
# layers is [L, d], yet neither is a matrix.
_DECAYED = ("kernel", "embedding", "w_in", "w_gate", "w_out", "noise_kernel", "projection")
# Of a router, what is normalised (decay would do nothing to it) and the scalars as well.
_NOT_DECAYED = ("scale", "bias", "b_in", "b_out", "eta", "log_scale", "expert_embedding", "slots")


def learning_rate_schedule(
    peak: float, *, steps: int, warmup_steps: int, final_fraction: float
) -> optax.Schedule:
    """Linear warmup to ``peak``, then a cosine to ``peak * final_fraction`` at the last step.

    Returns:
      (number of updates already made) -> learning rate of the next. The first update has
      peak / warmup_steps and not 0, and the last has exactly the final value.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=peak * final_fraction,
    )
    return lambda count: schedule(count + 1)


def decay_mask(params) -> dict:
    """A tree like ``params`` with True where weight decay applies, decided by the last name.

    Raises:
      ValueError: a parameter name that the decision does not know.
    """

    def decayed(path, _):
        name = path[-1].key
        if name not in _DECAYED + _NOT_DECAYED:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)}: no rule for weight decay; allowed names:"
                f" {', '.join(_DECAYED)} (decayed), {', '.join(_NOT_DECAYED)} (not)"
            )
        return name in _DECAYED

    return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(
    schedule: optax.Schedule, *, weight_decay: float, b1: float, b2: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clips the gradient to a global norm of ``clip_norm``, then AdamW.

    Decoupled weight decay (Loshchilov & Hutter 2019): every matrix shrinks by
    learning rate * weight_decay per step, see ``decay_mask``.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask),
    )
