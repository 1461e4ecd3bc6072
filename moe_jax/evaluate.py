"""The command python -m moe_jax.evaluate: a table, pictures and JSON for the runs of a workdir."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from moe_jax.checkpoints import CheckpointError, best_step, restore_trees, saved_steps
from moe_jax.config import CommandParser, ConfigError, config_from_json, resolve_runs, validate
from moe_jax.data.cache import atomic_write
from moe_jax.models.accounting import (
    ForwardFlops,
    ParameterCount,
    count_parameters,
    forward_flops_per_token,
)
from moe_jax.routing import ExpertChoice, ExpertMerge, SoftChoice, TokenChoice, dense_gates
from moe_jax.train.build import make_initial_state, make_method, make_model
from moe_jax.train.evaluation import Evaluation, bytes_per_token, evaluate_batches
from moe_jax.train.log import LogError, read_metrics
from moe_jax.untrusted import one_line

DESCRIPTION = """\
Evaluates the checkpoints of a workdir on held-out documents, without noise and dropout and with
the capacity that the config names. Prints a table beside unigram and bigram baselines; writes
evaluation.json (the workdir and each run), evaluation_load.npz (load and dropped assignments by
layer and expert, each run) and pictures/ (PNG, the CSV behind each, and token_map.html)."""
EXAMPLE = "example: python -m moe_jax.evaluate --workdir runs/demo"
SPLITS = ("test", "validation")

_PASSAGE_TOKENS = 384
_SLOTS = 4  # experts shown of a token that may have many


class Run(NamedTuple):
    """A trained run: its folder, its config, and the step of the checkpoint to evaluate."""

    name: str
    directory: Path
    config: ConfigDict
    step: int


class Passage(NamedTuple):
    """Tokens as bytes, and their experts and gates [L, n, K], largest first."""

    tokens: list[bytes]
    expert: np.ndarray
    gate: np.ndarray


class Result(NamedTuple):
    """What the evaluation of a run found.

    Attributes:
      run: which.
      evaluation: likelihood and routing on the held-out split.
      parameters: total and active.
      flops: of the forward pass per token, active experts only, as many as were measured.
      train_tokens_per_second: median over the rows of the run's metrics; None without any.
      passage: the start of the held-out text with the experts of its tokens; None for a dense run.
    """

    run: Run
    evaluation: Evaluation
    parameters: ParameterCount
    flops: ForwardFlops
    train_tokens_per_second: float | None
    passage: Passage | None


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    import absl.logging

    # Orbax logs errors with their stack before it raises them.
    absl.logging.set_verbosity(absl.logging.FATAL)
    try:
        options = _parse(arguments)
        runs = find_runs(options.workdir, step=options.step, best=options.best)
        evaluate_workdir(options.workdir, runs, split=options.split, batch_size=options.batch_size)
    except (ConfigError, CheckpointError, LogError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing is lost, run the same command again", file=sys.stderr)
        return 130
    return 0


def find_runs(workdir: Path, *, step: int | None = None, best: bool = False) -> list[Run]:
    """The trained runs of a workdir.

    Args:
      workdir: of ``python -m moe_jax.train``.
      step: the checkpoint to take; the last one by default.
      best: take the one of lowest validation cross-entropy instead.

    Raises:
      ConfigError: no workdir, nothing trained in it, no such checkpoint.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--workdir: got {str(workdir)!r}, which has no config.json; allowed: a workdir of"
            " python -m moe_jax.train"
        )
    runs = []
    try:
        config = config_from_json(path.read_bytes())
        validate(config)
        configs = resolve_runs(config)
    except ValueError as error:
        raise ConfigError(f"--workdir: {path}: {error}") from None
    for name, config in configs.items():
        directory = workdir / name
        steps = saved_steps(directory / "checkpoints")
        if not steps:
            print(f"{directory}: no checkpoint yet, left out", flush=True)
            continue
        if step is not None and step not in steps:
            saved = ", ".join(map(str, steps))
            raise ConfigError(f"--step: got {step}; allowed in {directory}: {saved}")
        chosen = step if step is not None else steps[-1]
        if best:
            chosen = best_step(directory / "checkpoints")
            if chosen is None:
                raise ConfigError(f"--best: no checkpoint of {directory} was validated")
        runs.append(Run(name or workdir.name, directory, config, chosen))
    if not runs:
        raise ConfigError(f"--workdir: nothing is trained in {workdir}; run moe_jax.train first")
    return runs


def evaluate_workdir(
    workdir: Path, runs: Sequence[Run], *, split: str, batch_size: int | None = None
) -> list[Result]:
    """Evaluates runs, prints the table, and writes JSON, arrays and pictures.

    Args:
      workdir: gets evaluation.json and pictures/.
      runs: of ``find_runs``.
      split: "test" or "validation".
      batch_size: sequences per batch; the run's own by default. It changes the result of models
        with a capacity, since the tokens of a batch compete for places.
    """
    # Read first: a damaged file is told of before the work, not after it.
    histories = {run.name: read_metrics(run.directory) for run in runs}
    results = [_evaluate_run(run, split, batch_size, histories[run.name]) for run in runs]
    rows = [_row(result, split, batch_size) for result in results]
    baselines = _baselines(runs, {split, "validation"})
    report = {"split": split, "runs": rows, "baselines": baselines[split]}
    _write_json(workdir / "evaluation.json", report)
    _print_table(rows, baselines[split], split)
    pictures = _draw(workdir, results, histories, baselines["validation"], split)
    print("\npictures:", *(f"  {path}" for path in pictures), sep="\n", flush=True)
    return results


def _evaluate_run(run, split, batch_size, history):
    from moe_jax.data.pipeline import evaluation_batches

    tokenizer, text = _load_data(run.config, split)
    model, variables = _load_model(run, tokenizer.vocab_size)
    sequence_length = run.config.data.sequence_length
    batch_size = batch_size or run.config.data.batch_size
    batches = evaluation_batches(text, sequence_length=sequence_length, batch_size=batch_size)
    num_batches = math.ceil((len(text.tokens) - 1) / (sequence_length * batch_size))
    evaluation = evaluate_batches(
        model,
        variables,
        _with_progress(batches, num_batches, f"{run.name}: evaluating step {run.step}"),
        token_bytes=bytes_per_token(tokenizer),
    )
    parameters_of, computed = _experts_per_token(run.config, evaluation)
    result = Result(
        run,
        evaluation,
        count_parameters(variables["params"], parameters_of),
        forward_flops_per_token(variables["params"], computed, sequence_length),
        _train_tokens_per_second(history),
        None if evaluation.load is None else _passage(model, variables, tokenizer, text),
    )
    _write_json(run.directory / "evaluation.json", _row(result, split, batch_size))
    if evaluation.load is not None:
        _write_load(run.directory / "evaluation_load.npz", evaluation)
    return result


def _experts_per_token(config, evaluation):
    """Experts whose parameters a token uses, and as how many its arithmetic counts: averages."""
    method = make_method(config)
    if method is None:
        return 0, 0
    if method.choice_type is ExpertMerge:
        return config.moe.num_experts, 1
    active = float(np.mean(evaluation.statistics.active_experts))
    return config.moe.num_experts if method.choice_type is SoftChoice else active, active


def _row(result, split, batch_size):
    """The result as plain data."""
    run = result.run
    method = make_method(run.config)
    return {
        "name": run.name,
        "step": run.step,
        "split": split,
        "batch_size": batch_size or run.config.data.batch_size,
        "num_tokens": result.evaluation.num_tokens,
        "num_bytes": result.evaluation.num_bytes,
        **result.evaluation.scalars(),
        "parameters_total": result.parameters.total,
        "parameters_active": result.parameters.active,
        "forward_flops_per_token": result.flops.total,
        "train_tokens_per_second": result.train_tokens_per_second,
        "sees_future": method is not None and method.sees_future == "always",
    }


def _baselines(runs, splits):
    """{split: rows of unigram and bigram}, fitted once per tokenizer on its training split."""
    from moe_jax.analysis.ngram import fit_bigram, fit_unigram, total_nll

    rows, seen = {split: [] for split in splits}, set()
    for run in runs:
        tokenizer, train = _load_data(run.config, "train")
        if tokenizer.name in seen:
            continue
        seen.add(tokenizer.name)
        for name, fit in (("unigram", fit_unigram), ("bigram", fit_bigram)):
            fitted = fit(train.tokens, tokenizer.vocab_size)
            for split in splits:
                _, held_out = _load_data(run.config, split)
                nll, num_tokens = total_nll(fitted, held_out.tokens), len(held_out.tokens) - 1
                rows[split].append(
                    {
                        "name": name,
                        "tokenizer": tokenizer.name,
                        "cross_entropy": nll / num_tokens,
                        "perplexity": float(np.exp(nll / num_tokens)),
                        "bits_per_byte": nll / np.log(2) / held_out.num_bytes,
                    }
                )
    return rows


def _draw(workdir, results, histories, baselines, split):
    """Writes the pictures; returns their paths. ``baselines`` are of the validation split."""
    from moe_jax.analysis import plots

    directory = workdir / "pictures"
    # Nats per token can be compared within one tokenizer only.
    comparable = {row["tokenizer"] for row in baselines}
    lines = {row["name"]: row["cross_entropy"] for row in baselines if len(comparable) == 1}
    curves = {name: rows for name, rows in histories.items() if rows}
    paths = [plots.loss_curves(curves, directory, baselines=lines).png] if curves else []
    for result in results:
        run = result.run
        if result.evaluation.load is None:
            continue
        suffix = "" if run.directory == workdir else f"_{run.name}"
        layers = range(run.config.moe.every, run.config.model.num_layers + 1, run.config.moe.every)
        picture = plots.load_heatmap(
            result.evaluation.load,
            directory,
            layers=list(layers),
            subtitle=f"{run.name}, {split} split, step {run.step}",
            name=f"expert_load{suffix}",
        )
        paths.append(picture.png)
        if run.name in curves:
            picture = plots.routing_over_time(
                curves[run.name],
                directory,
                num_experts=run.config.moe.num_experts,
                title=f"Routing over training: {run.name}",
                name=f"routing_over_time{suffix}",
            )
            paths.append(picture.png)
        paths.append(_draw_token_map(result, split, list(layers), directory, f"token_map{suffix}"))
    return paths


def _draw_token_map(result, split, layers, directory, name):
    """An HTML page: which expert takes which token of the start of the held-out text."""
    from moe_jax.analysis.token_map import token_map_html

    run, passage = result.run, result.passage
    page = token_map_html(
        *passage,
        run.config.moe.num_experts,
        title=f"Which expert takes which token: {run.name}",
        note=f"Step {run.step}, the first {len(passage.tokens)} tokens of the {split} split.",
        layers=layers,
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.html"
    path.write_text(page, encoding="utf-8")
    return path


def _passage(model, variables, tokenizer, text):
    """The start of a text, routed."""
    tokens = np.asarray(text.tokens[1 : _PASSAGE_TOKENS + 1], np.int32)
    _, info = jax.jit(model.apply)(variables, tokens[None])
    as_bytes = [tokenizer.token_bytes(int(token)) for token in tokens]
    return Passage(as_bytes, *_slots(info.routing))


def _slots(routing):
    """The experts and gates [L, T, K] of each token, largest first, of any kind of choice."""
    if isinstance(routing, TokenChoice):
        return np.asarray(routing.expert), np.asarray(routing.gate)
    weights = jax.vmap(dense_gates)(routing) if isinstance(routing, ExpertChoice) else routing.probs
    weights = np.asarray(weights)
    expert = np.argsort(-weights, axis=-1, kind="stable")[..., :_SLOTS]
    gate = np.take_along_axis(weights, expert, axis=-1)
    return np.where(gate > 0, expert, weights.shape[-1]), gate


def _print_table(rows, baselines, split):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Held-out documents ({split} split)")
    table.add_column("model")
    for column in ("perplexity", "bits per byte", "params total", "active", "MFLOP/token"):
        table.add_column(column, justify="right")
    for column in ("load CV", "dropped %", "train tokens/s"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: row["bits_per_byte"]):
        routed = "load_cv_mean" in row
        speed = row["train_tokens_per_second"]
        table.add_row(
            Text(one_line(row["name"])),  # rich would read what is in brackets as markup
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.4f}",
            f"{row['parameters_total']:,}",
            f"{row['parameters_active']:,}",
            f"{row['forward_flops_per_token'] / 1e6:.2f}",
            f"{row['load_cv_mean']:.3f}" if routed else "-",
            f"{100 * row['dropped_fraction_mean']:.2f}" if routed else "-",
            "-" if speed is None else f"{speed:,.0f}",
        )
    several = len({row["tokenizer"] for row in baselines}) > 1
    for row in baselines:
        name = f"{row['name']} ({row['tokenizer']})" if several else row["name"]
        numbers = f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.4f}"
        table.add_row(name, *numbers, *["-"] * 6, style="dim")
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    leaking = [row["name"] for row in rows if row["sees_future"]]
    if leaking:
        print(f"{', '.join(leaking)}: the routing sees later tokens, so this is no likelihood")


def _load_data(config, split):
    """The tokenizer of a run and a split of its dataset; both are cached on disk."""
    from moe_jax.data.pipeline import load_split
    from moe_jax.data.tokenizers import load_tokenizer

    data = config.data
    vocab_size = None if data.tokenizer == "byte" else data.vocab_size
    tokenizer = load_tokenizer(data.tokenizer, data.dataset, vocab_size, data.cache_dir)
    return tokenizer, load_split(data.dataset, split, tokenizer, data.cache_dir)


def _load_model(run, vocab_size):
    """The model of a run and its variables in the checkpoint."""
    # Who computes is a matter of this machine, not of the one that it was trained on.
    run.config.moe.backend = None
    model = make_model(run.config, vocab_size)
    shapes = jax.eval_shape(lambda: make_initial_state(run.config, model)).variables
    return model, restore_trees(run.directory / "checkpoints", run.step, shapes)


def _with_progress(batches, num_batches, description):
    import tqdm

    seconds = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm.tqdm(batches, description, num_batches, unit="batch", mininterval=seconds)


def _train_tokens_per_second(history):
    speeds = [row.get("tokens_per_second") for row in history]
    speeds = [speed for speed in speeds if speed is not None]
    return float(np.median(speeds)) if speeds else None


def _write_json(path, data):
    with atomic_write(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def _write_load(path, evaluation):
    with atomic_write(path) as file:
        np.savez(file, load=evaluation.load, dropped=evaluation.dropped)


def _parse(arguments):
    parser = CommandParser(
        prog="python -m moe_jax.evaluate",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", type=Path, required=True, help="of python -m moe_jax.train")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: %(default)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="checkpoint to evaluate; default: the last one")
    which.add_argument(
        "--best", action="store_true", help="the checkpoint of lowest validation cross-entropy"
    )
    parser.add_argument("--batch_size", type=int, help="sequences per batch; default: the run's")
    options = parser.parse_args(arguments)
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch_size: got {options.batch_size}; allowed: whole numbers >= 1")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
