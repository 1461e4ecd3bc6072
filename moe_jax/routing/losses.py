"""Auxiliary losses of a router, and the rules that adapt a bias or a weight instead of a loss.

Every loss is a mean over the valid tokens of what it is given, so a loss over the global batch is
the loss of the global arrays; a mean of the losses of parts is a different number. For several
layers, take the loss of each and then the mean: joining the layers first hides a collapse that
differs from layer to layer.

Axis legend: T tokens, E experts, k choices, K slots.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from moe_jax.routing.types import (
    TokenChoice,
    check_count,
    check_logits,
    check_valid,
    dense_gates,
    expert_counts,
)


def load_balance_loss(
    routing: TokenChoice,
    *,
    valid: jax.Array | None = None,
    per: Literal["assignment", "token"] = "assignment",
    choices: Literal["all", "first"] = "all",
    num_sequences: int | None = None,
) -> jax.Array:
    """E * sum_i f_i P_i: the share f of the load times the mean probability P of each expert.

    Source: Switch Transformer eq. 4, with f = counts / (kT), so that perfect balance gives 1 for
    every k. f is not differentiated; the gradient reaches the router through P.

    Args:
      routing: of one layer; probs is the softmax over all experts.
      valid: bool[T], the tokens that count in f and P. None: those that hold any expert or
        probability count, which is all of them unless the router was given ``valid``.
      per: what f counts per: "assignment", f = counts / (kT), or "token", f = counts / T as in
        Mixtral's published code (k times as large).
      choices: which assignments f counts: "all" of a token's, or its "first" alone, as in GShard
        (Lepikhin et al. 2020, arXiv:2006.16668).
      num_sequences: the scope. None: f and P are those of all tokens together. G: of each of G
        sequences of T/G tokens by itself, and the result is the mean over sequences, each counting
        by its valid tokens. It then is the same in whatever batches the sequences come.

    Returns:
      f32[]; 1 at perfect balance ("assignment"), E when everything goes to one expert with
      certainty, 0 without any valid token.

    Raises:
      ValueError: unknown ``per`` or ``choices``, ``valid`` not [T], G no divisor of T.
    """
    if not hasattr(routing, "expert"):
        name = type(routing).__name__
        raise ValueError(f"routing: got {name}; allowed: TokenChoice, which has assignments")
    for name, value, allowed in (
        ("per", per, ("assignment", "token")),
        ("choices", choices, ("all", "first")),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}; allowed: {', '.join(map(repr, allowed))}")
    num_tokens, num_experts = routing.probs.shape
    if valid is None:
        valid = jnp.any(routing.probs != 0, axis=-1)
    valid = check_valid(valid, num_tokens)
    groups = 1 if num_sequences is None else num_sequences
    if groups < 1 or num_tokens % groups:
        raise ValueError(f"num_sequences: got {groups}; allowed: divisors of {num_tokens} (T)")
    expert = routing.expert[:, :1] if choices == "first" else routing.expert
    expert = jnp.where(valid[:, None], expert, num_experts).reshape(groups, -1)
    probs = jnp.where(valid[:, None], routing.probs, 0.0).reshape(groups, -1, num_experts)
    tokens = jnp.sum(valid.reshape(groups, -1), axis=1)[:, None]
    counts = jax.vmap(lambda expert: expert_counts(expert, num_experts))(expert)
    # The total is kT, unless some slots are empty.
    total = jnp.sum(counts, axis=1, keepdims=True) if per == "assignment" else tokens
    fraction = jax.lax.stop_gradient(counts / jnp.maximum(total, 1))
    importance = jnp.sum(probs, axis=1) / jnp.maximum(tokens, 1)
    loss = num_experts * jnp.sum(fraction * importance, axis=1)
    return jnp.sum(loss * tokens[:, 0]) / jnp.maximum(jnp.sum(tokens), 1)


def importance_loss(routing: TokenChoice, *, valid: jax.Array | None = None) -> jax.Array:
    """Squared coefficient of variation of the experts' gates, each summed over the tokens.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), eq. 7.

    Args:
      routing: of one layer.
      valid: bool[T], the tokens that count. None: all.

    Returns:
      f32[]; 0 when all experts have the same sum, or nobody has any.
    """
    valid = check_valid(valid, routing.probs.shape[0])
    gates = jnp.where(valid[:, None], dense_gates(routing), 0.0)
    return _squared_variation(jnp.sum(gates, axis=0))


def load_loss(chance: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
    """Squared coefficient of variation of a load that has a gradient.

    Source: Shazeer et al. 2017, eq. 11.

    Args:
      chance: f32[T, E], the probability that the token goes to the expert, as ``smooth_load``.
      valid: bool[T], the tokens that count. None: all.

    Returns:
      f32[]; 0 when all experts have the same sum, or nobody has any.
    """
    valid = check_valid(valid, chance.shape[0])
    return _squared_variation(jnp.sum(jnp.where(valid[:, None], chance, 0.0), axis=0))


def z_loss(logits: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
    """Mean over valid tokens of logsumexp(logits)^2, which keeps router logits small.

    Source: ST-MoE (Zoph et al. 2022), eq. 5.

    Args:
      logits: float[T, E]; computed in float32.
      valid: bool[T]. None: all.

    Returns:
      f32[]; 0 without any valid token. A row of -inf only counts as 0.

    Raises:
      ValueError: logits not [T, E], or ``valid`` not [T].
    """
    logits = jnp.asarray(logits, jnp.float32)
    if logits.ndim != 2:
        raise ValueError(f"logits: got shape {logits.shape}; allowed: [T, E]")
    counted = jnp.any(logits != -jnp.inf, axis=-1)
    valid = check_valid(valid, logits.shape[0])
    # Replaced before logsumexp too: its gradient on a row of -inf is NaN, and NaN * 0 is NaN.
    z = jax.nn.logsumexp(jnp.where((counted & valid)[:, None], logits, 0.0), axis=-1)
    z = jnp.where(counted & valid, z, 0.0)
    return jnp.sum(z * z) / jnp.maximum(jnp.sum(valid), 1)


def entropy_loss(probs: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
    """Mean over valid tokens of the entropy of probs f32[T, E], in nats.

    Without it a router can make every expert active by spreading its probability. Source: Huang et
    al. 2024 (arXiv:2403.07652).
    """
    probs = jnp.asarray(probs)
    valid = check_valid(valid, probs.shape[0])
    entropy = -jnp.sum(probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), axis=-1)
    return jnp.sum(jnp.where(valid, entropy, 0.0)) / jnp.maximum(jnp.sum(valid), 1)


def boundary_loss(
    logits: jax.Array,
    k: int,
    epsilon: jax.Array,
    target: jax.Array | float,
    *,
    weight: float = 1.0,
    valid: jax.Array | None = None,
) -> jax.Array:
    """weight * epsilon * (A - target), which drives the active experts A of a token to a target.

    A is the mean number of experts with z_i > z_[k] - epsilon, the k best included, and is not
    differentiated: the gradient on epsilon is weight * (A - target), which shrinks the margin while
    too many are active. Source: Tran Huu et al. 2026 (arXiv:2606.19036); their released code has
    weight = 0.01 times the number of tokens.

    Args:
      logits: float[T, E].
      k: choices per token, 1 <= k <= E.
      epsilon: f32[], the margin of ``smooth_top_k``.
      target: of A, k or more.
      weight: factor.
      valid: bool[T], the tokens that count. None: all.

    Returns:
      f32[]; 0 without any valid token.

    Raises:
      ValueError: logits not [T, E], k out of range, ``valid`` not [T].
    """
    logits, valid = check_logits(logits, valid)
    k = check_count("k", k, logits.shape[1], "the number of experts")
    kth = jax.lax.top_k(logits, k)[0][:, -1:]
    # As gap > -epsilon, like the gate: z_[k] - epsilon rounds to z_[k] for large logits.
    active = (logits != -jnp.inf) & ((kth == -jnp.inf) | (logits - kth > -epsilon))
    tokens = jnp.sum(valid)
    number = jnp.sum(active & valid[:, None]) / jnp.maximum(tokens, 1)
    excess = jax.lax.stop_gradient(jnp.where(tokens > 0, number - target, 0.0))
    return weight * epsilon * excess


def relu_l1_loss(
    gates: jax.Array, k: int, weight: jax.Array | float, *, valid: jax.Array | None = None
) -> jax.Array:
    """weight * E / (T^2 k) * sum_e (sum_t gate) (number of tokens with a gate), ReMoE's loss.

    The number of tokens is not differentiated. Source: ReMoE (Wang et al. 2025, arXiv:2412.14711).

    Args:
      gates: f32[T, E], >= 0; 0 at invalid tokens.
      k: active experts per token that are wanted.
      weight: f32[], see ``adapt_l1_weight``.
      valid: bool[T], the tokens that count in T. None: all.

    Returns:
      f32[]; 0 without any valid token.
    """
    gates = jnp.asarray(gates)
    num_tokens, num_experts = gates.shape
    valid = check_valid(valid, num_tokens)
    gates = jnp.where(valid[:, None], gates, 0.0)
    active = jax.lax.stop_gradient(jnp.sum(gates > 0, axis=0).astype(jnp.float32))
    tokens = jnp.maximum(jnp.sum(valid), 1).astype(jnp.float32)
    # T^2 in int32 would overflow at 46341 tokens.
    share = jnp.sum((jnp.sum(gates, axis=0) / tokens) * (active / tokens))
    return weight * num_experts / k * share


def adapt_l1_weight(
    weight: jax.Array, sparsity: jax.Array, k: int, num_experts: int, factor: float = 1.2
) -> jax.Array:
    """The weight of ``relu_l1_loss`` for the next step: larger while too many experts are active.

    Source: ReMoE (Wang et al. 2025).

    Args:
      weight: f32[...].
      sparsity: f32[], share of gates that are 0, over all layers and the whole batch.
      k: active experts per token that are wanted, so the sparsity wanted is 1 - k / E.
      num_experts: E.
      factor: of one step.

    Returns:
      f32[...], within [1e-20, 1e20]: a weight that underflowed could never grow again.
    """
    weight = jnp.where(sparsity < 1.0 - k / num_experts, weight * factor, weight / factor)
    return jnp.clip(weight, 1e-20, 1e20)


def balance_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """The selection bias for the next step: up for experts below the mean load, down above.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1, DeepSeek-V3. The mean is taken off at
    the end, since a constant selects nobody and would drift.

    Args:
      bias: f32[E].
      counts: int[E], assignments of the last step, over the whole batch.
      rate: step; 0 leaves the differences as they are.

    Returns:
      f32[E], of mean 0.
    """
    counts = jnp.asarray(counts, jnp.float32)
    bias = jnp.asarray(bias, jnp.float32) + rate * jnp.sign(jnp.mean(counts) - counts)
    return bias - jnp.mean(bias)


def _squared_variation(load):
    """Variance over squared mean, f32[]; without a square root, whose gradient at 0 is infinite."""
    mean = jnp.mean(load)
    return jnp.mean((load - mean) ** 2) / jnp.where(mean == 0, 1.0, mean) ** 2
