"""The command python -m moe_jax.convert: what is in a checkpoint, and other forms of it."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from moe_jax.checkpoints import (
    CheckpointError,
    Checkpoints,
    best_step,
    restore_trees,
    saved_arrays,
    saved_steps,
    validation_cross_entropy,
)
from moe_jax.checkpoints.files import check_checkpoint, copy_checkpoint
from moe_jax.checkpoints.names import arrays_by_name, gather, one_by_one, trees_by_name
from moe_jax.checkpoints.safetensors_files import (
    INDEX_SUFFIX,
    SafetensorsReader,
    open_safetensors,
    write_safetensors,
)
from moe_jax.config import (
    CommandParser,
    ConfigError,
    config_from_json,
    config_to_json,
    resolve_runs,
    validate,
)
from moe_jax.models.accounting import ParameterCount, count_parameters
from moe_jax.routing import ExpertMerge, SoftChoice
from moe_jax.train.build import make_initial_state, make_method, make_model, vocabulary_of
from moe_jax.untrusted import one_line

DESCRIPTION = """\
Shows what is in a checkpoint, and brings it into other forms.

inspect  a table of all arrays
         --workdir RUN [--step N|last|best] [--json]
prune    a copy without the optimizer, which python -m moe_jax.evaluate reads
         --workdir RUN --output DIR [--step ...] [--keep params,router_state]
export   parameters and router state as safetensors, layers one by one
         --workdir RUN --output FILE.safetensors [--step ...] [--layers blocks|scanned]
         [--max_shard_megabytes 4096]
import   a workdir, which python -m moe_jax.evaluate reads, of an exported file
         --input FILE.safetensors --workdir DIR

RUN is a workdir of python -m moe_jax.train, or with variants the folder of one of them."""
EXAMPLE = "example: python -m moe_jax.convert inspect --workdir runs/demo/moe"
FORMAT, FORMAT_VERSION = "moe_jax", "1"
KEPT = "params,router_state"
LAYERS = ("blocks", "scanned")

_MEGABYTE = 10**6
_LAST_STEP = 2**31 - 1


class Run(NamedTuple):
    """A single run and one of its checkpoints."""

    config: ConfigDict
    checkpoints: Path
    step: int


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    import absl.logging

    # Orbax logs errors with their stack before it raises them.
    absl.logging.set_verbosity(absl.logging.FATAL)
    try:
        options = _parse(arguments)
        options.convert(options)
    except (ConfigError, CheckpointError, FloatingPointError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def find_run(workdir: Path, step: str = "last") -> Run:
    """The run of a workdir and a checkpoint of it.

    Args:
      workdir: of a single run.
      step: "last", "best" (of lowest validation cross-entropy) or a number.

    Raises:
      ConfigError: no workdir, one of several runs, no such checkpoint.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--workdir: got {str(workdir)!r}, which has no config.json; allowed: a workdir of"
            " python -m moe_jax.train"
        )
    try:
        config = config_from_json(path.read_bytes())
        validate(config)
        runs = resolve_runs(config)
    except ValueError as error:
        raise ConfigError(f"--workdir: {path}: {error}") from None
    if "" not in runs:
        raise ConfigError(
            f"--workdir: {workdir} has the runs {', '.join(runs)}; allowed: one of them, such as"
            f" {workdir / next(iter(runs))}"
        )
    checkpoints = workdir / "checkpoints"
    return Run(runs[""], checkpoints, _chosen_step(checkpoints, step))


def inspect(options: argparse.Namespace) -> None:
    """Prints the arrays of a checkpoint and their sums."""
    run = find_run(options.workdir, options.step)
    trees = saved_arrays(run.checkpoints, run.step)
    parameters = _count(run.config, trees["params"]) if "params" in trees else ParameterCount(0, 0)
    arrays = [
        _array_row(tree, path, shape, parameters.total)
        for tree, shapes in trees.items()
        for path, shape in shapes.items()
    ]
    totals = {
        tree: sum(_nbytes(shape) for shape in shapes.values()) / _MEGABYTE
        for tree, shapes in trees.items()
    }
    report = {
        "checkpoint": str(run.checkpoints / str(run.step)),
        "step": run.step,
        "cross_entropy": validation_cross_entropy(run.checkpoints, run.step),
        "parameters_total": parameters.total,
        "parameters_active": parameters.active,
        "megabytes": totals,
        "arrays": arrays,
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)


def prune(options: argparse.Namespace) -> None:
    """Writes a workdir with some of the trees of a checkpoint."""
    run = find_run(options.workdir, options.step)
    _require_empty("--output", options.output)
    check_checkpoint(run.checkpoints, run.step)
    source = run.checkpoints / str(run.step)
    target = options.output / "checkpoints" / str(run.step)
    there = sorted(path.parent.name for path in source.glob("*/_METADATA"))
    keep = options.keep.split(",")
    needed = [name for name in KEPT.split(",") if name in there]
    unknown = [name for name in keep if name not in there and name not in KEPT.split(",")]
    if unknown or not set(needed) <= set(keep):
        raise ConfigError(
            f"--keep: got {options.keep!r}; allowed: {','.join(needed)}, which evaluation needs,"
            f" and of {','.join(there)} what else is wanted"
        )
    target.parent.mkdir(parents=True)
    copy_checkpoint(source, target, names=keep)
    (options.output / "config.json").write_text(config_to_json(run.config))
    before, after = _folder_megabytes(source), _folder_megabytes(target)
    print(f"{source}: {before:,.2f} MB\n{target}: {after:,.2f} MB")


def export(options: argparse.Namespace) -> None:
    """Writes parameters and router state as safetensors."""
    run = find_run(options.workdir, options.step)
    path = options.output
    if path.suffix != ".safetensors":
        raise ConfigError(f"--output: got {str(path)!r}; allowed: a file named *.safetensors")
    for existing in (path, path.with_name(path.name + INDEX_SUFFIX)):
        if existing.exists():
            raise ConfigError(f"--output: {existing} exists; allowed: a new file")
    trees = restore_trees(run.checkpoints, run.step, _model_shapes(run.config))
    arrays = {name: np.asarray(array) for name, array in arrays_by_name(trees).items()}
    if options.layers == "blocks":
        arrays = one_by_one(arrays)
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": str(run.step),
        "config": config_to_json(run.config),
    }
    cross_entropy = validation_cross_entropy(run.checkpoints, run.step)
    if cross_entropy is not None:
        metadata["cross_entropy"] = repr(cross_entropy)
    path.parent.mkdir(parents=True, exist_ok=True)
    max_shard_bytes = options.max_shard_megabytes * _MEGABYTE
    files = write_safetensors(path, arrays, metadata, max_shard_bytes=max_shard_bytes)
    for file in files:
        print(f"{file}: {file.stat().st_size / _MEGABYTE:,.2f} MB")
    print(f"{len(arrays)} arrays of step {run.step}")


def import_(options: argparse.Namespace) -> None:
    """Writes a workdir with the parameters and the router state of an exported file."""
    _require_empty("--workdir", options.workdir)
    with open_safetensors(options.input) as reader:
        config, step, cross_entropy = _read_metadata(options.input, reader)
        num_layers = config.model.num_layers
        if num_layers > len(reader.shapes) and not config.model.scan_layers:
            raise CheckpointError(f"{options.input}: has fewer arrays than layers, {num_layers}")
        wanted = arrays_by_name(_model_shapes(config))
        try:
            arrays = gather(wanted, reader.shapes, reader.read)
        except CheckpointError as error:
            raise CheckpointError(f"{options.input}: {error}") from None
    checkpoints = options.workdir / "checkpoints"
    checkpoints.mkdir(parents=True)
    with Checkpoints(checkpoints, keep_last=1, keep_best=0) as saved:
        saved.save(step, trees_by_name(arrays), cross_entropy=cross_entropy)
    (options.workdir / "config.json").write_text(config_to_json(config))
    print(f"{checkpoints / str(step)}: {len(arrays)} arrays")


def _chosen_step(checkpoints, text):
    steps = saved_steps(checkpoints)
    if not steps:
        raise ConfigError(f"--workdir: {checkpoints} has no checkpoint; allowed: a trained run")
    if text == "last":
        return steps[-1]
    if text == "best":
        best = best_step(checkpoints)
        if best is None:
            raise ConfigError(f"--step: got best, but no checkpoint of {checkpoints} was validated")
        return best
    if text not in map(str, steps):
        saved = ", ".join(map(str, steps))
        raise ConfigError(f"--step: got {text}; allowed in {checkpoints}: {saved}, last, best")
    return int(text)


def _model_shapes(config):
    """{"params": ..., "router_state": ...} of a model, with shapes as leaves."""
    config.moe.backend = None  # of the machine that it was trained on
    model = make_model(config, vocabulary_of(config))
    return jax.eval_shape(lambda: make_initial_state(config, model)).variables


def _count(config, shapes):
    """Parameters in total, and of those that a token uses, with k experts a layer."""
    method = make_method(config)
    uses_all = method is not None and method.choice_type in (SoftChoice, ExpertMerge)
    return count_parameters(
        trees_by_name(shapes), config.moe.num_experts if uses_all else config.moe.k
    )


def _array_row(tree, path, shape, parameters):
    row = {
        "tree": tree,
        "path": path,
        "shape": list(shape.shape),
        "dtype": str(shape.dtype),
        "megabytes": _nbytes(shape) / _MEGABYTE,
    }
    return row | ({"fraction": shape.size / parameters} if tree == "params" else {})


def _nbytes(shape):
    return shape.size * shape.dtype.itemsize


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As text: rich would read what is in brackets as markup.
    table = Table(title=Text(one_line(report["checkpoint"])))
    for column in ("tree", "path"):
        table.add_column(column, overflow="fold")
    for column in ("shape", "dtype", "MB", "% of parameters"):
        table.add_column(column, justify="right")
    for row in report["arrays"]:
        table.add_row(
            Text(one_line(row["tree"])),
            Text(one_line(row["path"])),
            str(row["shape"]),
            row["dtype"],
            f"{row['megabytes']:.3f}",
            f"{100 * row['fraction']:.2f}" if "fraction" in row else "",
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    for tree, megabytes in report["megabytes"].items():
        print(f"{tree}: {megabytes:,.3f} MB")
    print(
        f"parameters: {report['parameters_total']:,}, active per token:"
        f" {report['parameters_active']:,}"
    )
    value = report["cross_entropy"]
    validated = "none" if value is None else f"{value:.4f} nats per token"
    print(f"step: {report['step']}, validation cross-entropy: {validated}")


def _require_empty(option, directory):
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{option}: got {str(directory)!r}; allowed: a new or empty directory")


def _folder_megabytes(folder):
    sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(sizes) / _MEGABYTE


def _read_metadata(path: Path, reader: SafetensorsReader) -> tuple[ConfigDict, int, float | None]:
    """The config, the step and the cross-entropy of a file of ``export``."""
    metadata = reader.metadata
    found = metadata.get("format"), metadata.get("format_version")
    if found != (FORMAT, FORMAT_VERSION):
        raise ConfigError(
            f"--input: {path}: got format {found[0]}, version {found[1]}; allowed: {FORMAT},"
            f" {FORMAT_VERSION}, of python -m moe_jax.convert export"
        )
    try:
        step = int(metadata["step"])
        cross_entropy = metadata.get("cross_entropy")
        cross_entropy = None if cross_entropy is None else float(cross_entropy)
        config = config_from_json(metadata["config"])
        validate(config)
        [config] = resolve_runs(config).values()
    except (KeyError, ValueError) as error:
        raise ConfigError(f"--input: {path}: the metadata is damaged: {error}") from None
    if not 0 <= step <= _LAST_STEP:
        raise ConfigError(f"--input: {path}: step: got {step}; allowed: 0..{_LAST_STEP}")
    if cross_entropy is not None and not math.isfinite(cross_entropy):
        raise ConfigError(
            f"--input: {path}: cross_entropy: got {cross_entropy}; allowed: finite numbers"
        )
    return config, step, cross_entropy


def _parse(arguments):
    parser = CommandParser(
        prog="python -m moe_jax.convert",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="inspect|prune|export|import")
    new = {name: commands.add_parser(name) for name in ("inspect", "prune", "export", "import")}
    for name, convert in zip(new, (inspect, prune, export, import_), strict=True):
        new[name].set_defaults(convert=convert)
        new[name].add_argument("--workdir", type=Path, required=True)
        if name != "import":
            new[name].add_argument("--step", default="last", help="a number, last or best")
    new["inspect"].add_argument("--json", action="store_true", help="instead of the table")
    for name in ("prune", "export"):
        new[name].add_argument("--output", type=Path, required=True)
    new["prune"].add_argument("--keep", default=KEPT, help="trees; default: %(default)s")
    new["export"].add_argument("--layers", choices=LAYERS, default="blocks")
    new["export"].add_argument("--max_shard_megabytes", type=int, default=4096)
    new["import"].add_argument("--input", type=Path, required=True)
    options = parser.parse_args(arguments)
    megabytes = getattr(options, "max_shard_megabytes", 1)
    if megabytes < 1:
        raise ConfigError(f"--max_shard_megabytes: got {megabytes}; allowed: whole numbers >= 1")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
