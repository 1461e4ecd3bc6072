"""Where the time of our train step goes, by part.

Every part is compiled and timed on its own, forward and backward, at the sizes of the demo; parts
that every block has count once per block. What the whole step takes beyond the sum is what lies
between the parts: residual sums, the scan over blocks, copies.

Axis legend: B sequences, S sequence length, d width, V vocabulary, T = B*S tokens, L blocks.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks import models, report, timing
from moe_jax.layers.attention import CausalSelfAttention
from moe_jax.train import build
from moe_jax.train.step import layer_statistics, make_train_step, token_nll

VARIANTS = ("moe", "dense")
STEP, MODEL = "whole step", "model and loss, forward and backward"
_COLUMNS = {
    "part": "part",
    "ms": "ms",
    "iqr_ms": "IQR",
    "times": "times",
    "total_ms": "total ms",
    "percent": "% of the step",
}


class Part(NamedTuple):
    """A piece of the step.

    Attributes:
      name: what it is.
      times: how often a step has it.
      function: what is compiled.
      arguments: what it is called with.
      detail_of: the part that this one is a piece of, which is counted already; "" if none.
      carried: so many leading arguments are donated, and replaced by the outputs for the next run.
    """

    name: str
    times: int
    function: Callable
    arguments: tuple
    detail_of: str = ""
    carried: int = 0


def profile_step(output: Path, record: Mapping[str, Any], *, rounds: int, quick: bool) -> None:
    """Times all parts of both models; writes profile.csv and profile.md, and prints the latter."""
    rows, text = [], f"# Parts of the train step\n\n{report.describe(record)}\n"
    for variant in VARIANTS:
        config = models.demo_config(variant, quick)
        new = _measure(variant, _parts(config), rounds)
        rows += new
        table = f"## {variant}\n\n{report.markdown(new, _COLUMNS)}\n"
        text += f"\n{table}"
        print(table, flush=True)
        report.write_csv(output / "profile.csv", rows)
        (output / "profile.md").write_text(text, encoding="utf-8")


def _measure(variant, parts, rounds):
    contenders = [
        timing.Contender(part.name, "jax", functools.partial(_compile, part), "") for part in parts
    ]
    results = timing.interleave(contenders, rounds=rounds, budget=20, label=f"parts of {variant}")
    rows = []
    for part in parts:
        result = results[part.name]
        if result.skipped:
            raise RuntimeError(f"{part.name}: {result.skipped}")
        q1, median, q3 = timing.quartiles(1e3 * s for s in result.seconds.values())
        name = f"- of {part.detail_of}: {part.name}" if part.detail_of else part.name
        row = {"variant": variant, "part": name, "ms": median, "iqr_ms": q3 - q1}
        rows.append(row | {"times": part.times, "total_ms": median * part.times})
    step_ms = next(row["ms"] for row in rows if row["part"] == STEP)
    explained = sum(
        row["total_ms"]
        for row, part in zip(rows, parts, strict=True)
        if part.name not in (STEP, MODEL) and not part.detail_of
    )
    rest = dict.fromkeys(rows[0], None) | {"variant": variant, "part": "between the parts"}
    rows.append(rest | {"total_ms": step_ms - explained})
    return [row | {"percent": 100 * row["total_ms"] / step_ms} for row in rows]


def _compile(part):
    function = jax.jit(part.function, donate_argnums=tuple(range(part.carried)))
    carried, fixed = part.arguments[: part.carried], part.arguments[part.carried :]
    # Other parts may have the arrays that are given away here.
    now = {"carried": jax.tree.map(jnp.copy, carried)}
    compiled = function.lower(*part.arguments).compile()

    def run():
        output = jax.block_until_ready(compiled(*now["carried"], *fixed))
        if part.carried:
            now["carried"] = output[: part.carried]
        return output

    return timing.Program(run)


def _with_gradient(function: Callable) -> Callable:
    """function(*differentiable) -> y as a function that also returns all gradients."""

    def forward_backward(*arguments):
        y, pull_back = jax.vjp(function, *arguments)
        return y, pull_back(jnp.ones_like(y))

    return forward_backward


def _parts(config) -> list[Part]:
    model = build.make_model(config, config.data.vocab_size)
    state = jax.jit(lambda: build.make_initial_state(config, model))()
    tokens = jnp.asarray(models.batches(config)[0])
    hidden = jax.random.normal(jax.random.key(1), (*tokens[:, 1:].shape, config.model.width))
    parts = _step_parts(config, model, state, tokens)
    parts += _embedding_parts(config, tokens, hidden)
    parts += _attention_parts(config, hidden)
    parts += _feed_forward_parts(config, model, tokens, hidden)
    parts += _optimizer_parts(config, state)
    return parts


def _step_parts(config, model, state, tokens):
    weights = build.make_weights(config)
    method = build.make_method(config)
    optimizer, schedule = build.make_optimizer_of(config), build.make_schedule(config)
    step = make_train_step(model, optimizer, schedule, weights, method=method, steps=config.steps)

    def loss(params):
        logits, _ = model.apply({"params": params}, tokens[:, :-1])
        return jnp.mean(token_nll(logits, tokens[:, 1:], None))

    return [
        Part(STEP, 1, step.__wrapped__, (state, {"tokens": tokens}), carried=1),
        Part(MODEL, 1, _with_gradient(loss), (state.params,)),
    ]


def _embedding_parts(config, tokens, hidden):
    """Looking tokens up, and the head with its cross-entropy; both use the same matrix."""
    vocab_size, width = config.data.vocab_size, config.model.width
    table = jax.random.normal(jax.random.key(2), (vocab_size, width))

    def embed(table):
        return jnp.take(table, tokens[:, :-1], axis=0)

    def logits(x, table):
        return jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)

    def nll(x, table):
        return token_nll(logits(x, table), tokens[:, 1:], None)

    head = "head and cross-entropy"
    return [
        Part("embedding", 1, _with_gradient(embed), (table,)),
        Part(head, 1, _with_gradient(nll), (hidden, table)),
        Part("logits", 1, _with_gradient(logits), (hidden, table), head),
    ]


def _attention_parts(config, hidden):
    model = config.model
    attention = CausalSelfAttention(model.num_heads)
    params = attention.init(jax.random.key(0), hidden)
    heads = hidden.reshape(*hidden.shape[:2], model.num_heads, -1)
    core = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    norm = nn.RMSNorm()
    norm_params = norm.init(jax.random.key(0), hidden)
    return [
        Part("attention", model.num_layers, _with_gradient(attention.apply), (params, hidden)),
        Part(
            "softmax(q k) v",
            model.num_layers,
            _with_gradient(core),
            (heads, heads, heads),
            "attention",
        ),
        Part("norms", 2 * model.num_layers + 1, _with_gradient(norm.apply), (norm_params, hidden)),
    ]


def _feed_forward_parts(config, model, tokens, hidden):
    layers, token_ids = config.model.num_layers, tokens[:, :-1]
    module = model.moe() if model.moe else model.dense()
    params = module.init(jax.random.key(0), hidden)

    def forward(params, hidden):
        return module.apply(params, hidden, token_ids=token_ids)[0]

    name = "MoE layer" if model.moe else "dense feed-forward"
    parts = [Part(name, layers, _with_gradient(forward), (params, hidden))]
    if not model.moe:
        return parts
    info = module.apply(params, hidden, token_ids=token_ids)[1]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), info)
    statistics = functools.partial(layer_statistics, valid=None)
    return [*parts, Part("routing statistics", 1, statistics, (stacked,))]


def _optimizer_parts(config, state):
    optimizer = build.make_optimizer_of(config)
    gradient: Any = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), state.params)

    def update(params, opt_state, gradient):
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    clip = optax.clip_by_global_norm(config.optimizer.clip_norm)

    def clipped(gradient):
        return clip.update(gradient, clip.init(gradient))[0]

    whole = "clipping and AdamW"
    return [
        Part(whole, 1, update, (state.params, state.opt_state, gradient), carried=2),
        Part("clipping", 1, clipped, (gradient,), whole),
    ]
