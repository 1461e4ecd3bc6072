"""The configuration of a run: its fields, what each may be, and how a command line changes them.

A config file defines ``get_config() -> ConfigDict``, usually ``base_config()`` with some fields
changed. The commands read it, check it and hand plain values on; no layer ever sees a config.
"""

import argparse
import difflib
import json
import math
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from moe_jax.checkpoints.partial import parse_rules
from moe_jax.dispatch import CAPACITY_SCOPES, EXCHANGES, IMPLEMENTATIONS, PRIORITIES
from moe_jax.kernels import BACKENDS
from moe_jax.routing import (
    ConstantGateWarning,
    ExpertMerge,
    SoftChoice,
    TokenChoice,
    default_arguments,
    make_router,
)
from moe_jax.untrusted import one_line, parse_json

ACTIVATIONS = (
    "celu",
    "elu",
    "gelu",
    "hard_swish",
    "identity",
    "leaky_relu",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "squareplus",
    "tanh",
)
DATASETS = ("sotu",)
DTYPES = ("bfloat16", "float32")
TOKENIZERS = ("bpe", "byte")

# A size beyond int32 is no size of an array here, and jax fails on it in its own ways.
_LARGEST = 2**31 - 1


class ConfigError(ValueError):
    """The user's mistake in a config, a command line or a workdir; the message is one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's own flags, whose complaints are a ConfigError."""

    def error(self, message):
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists what is allowed)")


class Field(NamedTuple):
    """One field of the config.

    Attributes:
      default: the value in ``base_config``.
      kind: bool, int, float or str. A whole number may stand for a float.
      help: what the field means, with its unit.
      allowed: the allowed values in words.
      accepts: whether a value of the right kind is allowed.
      optional: None is allowed too.
    """

    default: bool | int | float | str | None
    kind: type
    help: str
    allowed: str
    accepts: Callable[[Any], bool]
    optional: bool = False


def _whole(default, minimum, help, maximum=None):
    allowed = f"{minimum}..{maximum}" if maximum else f"whole numbers >= {minimum}, below 2**31"
    return Field(default, int, help, allowed, lambda v: minimum <= v <= (maximum or _LARGEST))


def _positive(default, help, optional=False):
    allowed = "numbers > 0" + (", or None" if optional else "")
    return Field(default, float, help, allowed, lambda v: v > 0, optional)


def _non_negative(default, help, optional=False):
    allowed = "numbers >= 0" + (", or None" if optional else "")
    return Field(default, float, help, allowed, lambda v: v >= 0, optional)


def _share(default, help):
    return Field(default, float, help, "0 <= number <= 1", lambda v: 0 <= v <= 1)


def _rate(default, help):
    return Field(default, float, help, "0 <= number < 1", lambda v: 0 <= v < 1)


def _yes_no(default, help):
    return Field(default, bool, help, "true, false", lambda v: True)


def _one_of(default, names, help):
    return Field(default, str, help, ", ".join(names), lambda v: v in names)


def _router_field(router, argument, default):
    """What values fit is for the router to say, see ``_check_router``."""
    help = f"argument of the router {router}"
    if default is None:
        return Field(None, int, help, "whole numbers, or None", _is_int32, optional=True)
    kind = type(default)
    allowed = {bool: "true, false", int: "whole numbers", float: "numbers", str: "a name"}[kind]
    return Field(default, kind, help, allowed, _is_int32 if kind is int else lambda v: True)


def _are_rules(text):
    try:
        return bool(parse_rules(text))
    except ValueError:
        return False


def _is_int32(value):
    return abs(value) <= _LARGEST


FIELDS: dict[str, Field] = {
    "seed": _whole(0, 0, "of the parameters, the order of the data and dropout", maximum=2**31 - 1),
    "steps": _whole(300, 1, "optimizer steps of the run"),
    "log_every_steps": _whole(10, 1, "between two rows of training metrics"),
    "evaluate_every_steps": _whole(100, 1, "between two validations; the last step has one too"),
    "evaluate_batches": _whole(0, 0, "batches per validation; 0: the whole split"),
    "checkpoint_every_steps": _whole(100, 1, "between two checkpoints; the last step has one too"),
    "keep_last": _whole(2, 1, "latest checkpoints kept"),
    "keep_best": _whole(
        1, 0, "best ones kept as well, of the checkpoints at steps with a validation"
    ),
    "on_nonfinite": _one_of(
        "stop",
        ("stop", "skip"),
        "what a step with a NaN or infinite loss or gradient does: end the run, or not update",
    ),
    "max_skipped_in_a_row": _whole(10, 1, "updates left out one after the other that end the run"),
    "data.dataset": _one_of("sotu", DATASETS, "name of the dataset"),
    "data.tokenizer": _one_of("byte", TOKENIZERS, "kind of the tokenizer"),
    "data.vocab_size": _whole(
        8192, 257, "tokens of the bpe tokenizer; the byte tokenizer has 257 anyway", maximum=65535
    ),
    "data.sequence_length": _whole(128, 1, "tokens per sequence"),
    "data.batch_size": _whole(16, 1, "sequences per optimizer step"),
    "data.cache_dir": Field(
        None, str, "where prepared data is kept", "a directory, or None", lambda v: v != "", True
    ),
    "data.timeout_seconds": _non_negative(
        300.0, "longest wait for a batch, which then ends the run; 0: no limit"
    ),
    "model.width": _whole(128, 1, "d, features per token"),
    "model.num_layers": _whole(4, 1, "blocks of attention and feed-forward", maximum=10_000),
    "model.num_heads": _whole(4, 1, "attention heads per layer"),
    "model.mlp_width": _whole(512, 1, "hidden width of the dense feed-forward"),
    "model.activation": _one_of("gelu", ACTIVATIONS, "of every feed-forward, a name in jax.nn"),
    "model.glu": _yes_no(False, "gated feed-forwards: activation(x w_gate) * (x w_in)"),
    "model.use_bias": _yes_no(False, "biases in the feed-forwards"),
    "model.tie_embeddings": _yes_no(True, "the embedding is the output matrix as well"),
    "model.dropout": _rate(0.0, "dropout rate"),
    "model.dtype": _one_of("float32", DTYPES, "compute dtype; parameters are float32"),
    "model.remat": _yes_no(False, "recompute blocks in the backward pass to save memory"),
    "model.scan_layers": _yes_no(False, "compile one group of blocks and scan over the groups"),
    "moe.num_experts": _whole(
        8, 0, "E, experts per MoE layer; 0: a dense model", maximum=1_000_000
    ),
    "moe.every": _whole(1, 1, "every n-th block is an MoE block"),
    "moe.k": _whole(2, 1, "experts per token"),
    "moe.expert_width": _whole(512, 1, "f, hidden width of an expert"),
    "moe.num_shared_experts": _whole(0, 0, "experts that every token visits besides"),
    "moe.implementation": _one_of("dropless", IMPLEMENTATIONS, "how the experts are computed"),
    "moe.capacity_factor": _positive(
        None, "expert capacity over its fair share; None: no token is dropped", optional=True
    ),
    "moe.capacity_scope": _one_of(
        "batch",
        CAPACITY_SCOPES,
        "whose tokens compete for an expert's capacity, where tokens choose: those of the batch, or"
        " of each device's part of it, which makes numbers depend on the mesh",
    ),
    "moe.priority": _one_of("arrival", PRIORITIES, "who is kept when an expert is full"),
    "moe.backend": Field(
        None,
        str,
        "who computes, where tokens choose, for dropless and sorted; None: the best there is",
        f"{', '.join(BACKENDS)}, or None",
        lambda v: v in BACKENDS,
        optional=True,
    ),
    "moe.exchange": Field(
        None,
        str,
        "how rows travel to the devices of their experts; None: the best for the devices",
        f"{', '.join(EXCHANGES)}, or None",
        lambda v: v in EXCHANGES,
        optional=True,
    ),
    "moe.input_jitter": _rate(
        0.0, "in training the router's input is times uniform numbers of 1 -+ this"
    ),
    "moe.expert_dropout": _rate(
        0.0, "in training each expert is left out of a step with this probability"
    ),
    "moe.allow_future_leak": _yes_no(
        False, "allow routers by which a token's output depends on later tokens"
    ),
    "router": _one_of("softmax_top_k", tuple(default_arguments()), "name of the router"),
    **{
        f"routers.{router}.{argument}": _router_field(router, argument, default)
        for router, arguments in default_arguments().items()
        for argument, default in arguments.items()
    },
    "losses.load_balance": _non_negative(
        None, "weight of the load-balance loss; None: the router's own default", optional=True
    ),
    "losses.load_balance_scope": _one_of(
        "batch", ("batch", "sequence"), "of what the load is to be balanced"
    ),
    "losses.z": _non_negative(
        None, "weight of the router z-loss; None: the router's own default", optional=True
    ),
    "init.checkpoint": Field(
        None,
        str,
        "whose last parameters the run starts from; None: all are initialised",
        "a workdir of a run or its folder of checkpoints, or None",
        lambda v: v != "",
        optional=True,
    ),
    "init.rules": Field(
        ".*",
        str,
        "which of them: regular expressions of whole paths, with commas; 'old->new' renames",
        "a comma-separated list of pattern or pattern->replacement",
        _are_rules,
    ),
    "mesh.data": Field(
        None,
        int,
        "copies of the model, each with a part of the batch; None: all the devices there are",
        "whole numbers >= 1, or None",
        lambda v: 1 <= v <= _LARGEST,
        optional=True,
    ),
    "mesh.fsdp": _whole(1, 1, "devices that share every matrix of a copy, and the batch"),
    "mesh.expert": _whole(1, 1, "devices that share the experts, and the batch"),
    "mesh.tensor": _whole(1, 1, "devices that share heads, hidden units and vocabulary"),
    "mesh.expert_nodes": _whole(
        1, 1, "nodes that the devices of mesh.expert are; 2 or more: their exchange has two hops"
    ),
    "optimizer.learning_rate": _positive(1e-3, "highest learning rate, after the warmup"),
    "optimizer.warmup_steps": _whole(30, 0, "steps of linear warmup"),
    "optimizer.final_fraction": _share(0.1, "last learning rate over the highest (cosine)"),
    "optimizer.weight_decay": _non_negative(0.1, "AdamW decay of matrices and embeddings"),
    "optimizer.b1": _rate(0.9, "AdamW decay of the first moment"),
    "optimizer.b2": _rate(0.95, "AdamW decay of the second moment"),
    "optimizer.clip_norm": _positive(1.0, "largest global norm of the gradient"),
    "optimizer.accumulate_steps": _whole(1, 1, "microbatches that a batch is split into"),
}

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CHANGES_NO_NUMBER = re.compile(
    r"data\.(cache_dir|timeout_seconds)$|mesh\.|moe\.exchange$|max_skipped_in_a_row$"
)
# What a workdir holds beside its runs.
_RESERVED_NAMES = ("checkpoints", "tensorboard", "pictures")


def base_config() -> ConfigDict:
    """A config with every field at its default and no variants."""
    values = {path: field.default for path, field in FIELDS.items()}
    routers = {router: {} for router in default_arguments()}
    config = ConfigDict(_nest(values, {"routers": routers, "variants": {}}))
    for path, field in FIELDS.items():
        if field.optional:
            _set(config, path, config_dict.placeholder(field.kind))  # a None that knows its type
            _set(config, path, field.default)
    return config


def validate(config: ConfigDict) -> None:
    """Checks every field of a config, of all its variants, and how they fit together.

    Raises:
      ConfigError: names the field, its value and what is allowed.
    """
    for name, run in resolve_runs(config).items():
        try:
            _check_combination(run)
        except ConfigError as error:
            raise ConfigError(f"{error} (variant {name})" if name else str(error)) from None


def resolve_runs(config: ConfigDict) -> dict[str, ConfigDict]:
    """The runs that a config stands for, each a config of its own.

    A variant is a nested dict of overrides of the other fields. Of the routers' arguments, only
    those of the chosen router stay.

    Returns:
      {variant: config} in alphabetical order, or {"": config} without variants. The name is the
      run's folder within the workdir. The configs have no ``variants``.

    Raises:
      ConfigError: unknown or missing fields, values of the wrong type or out of range. How the
        fields fit together is ``validate``'s to check.
    """
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config: got {type(config).__name__}; allowed: a ConfigDict")
    values = _plain(config)
    variants = values.pop("variants", {})
    if not isinstance(variants, dict):
        raise ConfigError(f"config.variants: got {variants!r}; allowed: a dict by name")
    base = _checked(_flatten(values), "")
    if "router" not in base:
        raise ConfigError("config.router: missing; start from moe_jax.config.base_config()")
    if not variants:
        return {"": _single_run(base)}
    runs = {}
    for name, overrides in variants.items():
        if not _VARIANT_NAME.fullmatch(str(name)) or name in _RESERVED_NAMES:
            raise ConfigError(
                f"config.variants: got the name {name!r}; allowed: letters, digits, '_', '-', '.',"
                f" and not {', '.join(_RESERVED_NAMES)}"
            )
        if not isinstance(overrides, dict):
            raise ConfigError(f"config.variants.{name}: got {overrides!r}; allowed: a nested dict")
        runs[name] = _single_run(base | _checked(_flatten(overrides), f"variants.{name}."))
    return runs


def config_to_json(config: ConfigDict) -> str:
    """The config as JSON text: plain data, which ``config_from_json`` reads back exactly.

    Raises:
      ConfigError: a value that is no bool, whole number, finite float, string or None.
    """
    try:
        return json.dumps(_plain(config), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config: not plain data: {error}") from None


def config_from_json(text: str | bytes) -> ConfigDict:
    """The config that ``config_to_json`` wrote.

    Raises:
      ConfigError: the text is not a JSON object, or one that no config can be.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"config: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config: got JSON {type(values).__name__}; allowed: an object")
    try:
        return ConfigDict(values)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"config: {_one_line(error)}") from None


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """The fields in which two single-run configs differ, each as "key: old -> new".

    What changes no number is left out: what is of a machine, such as ``data.cache_dir`` and the
    mesh, and limits on failures.
    """
    before, after = _flatten(_plain(old)), _flatten(_plain(new))
    keys = [key for key in before | after if not _CHANGES_NO_NUMBER.match(key)]
    absent = object()
    return [
        f"{key}: {_shown(before.get(key, '(none)'))} -> {_shown(after.get(key, '(none)'))}"
        for key in keys
        if before.get(key, absent) != after.get(key, absent)
    ]


def parse_command_line(
    arguments: Sequence[str], *, usage: str, with_workdir: bool = True
) -> tuple[ConfigDict, Path | None]:
    """Reads ``--config FILE.py[:argument] --workdir DIR [--config.key=value ...]``.

    ``--help`` prints ``usage`` and the list of fields, and exits with 0.

    Args:
      arguments: the command line without the program's name.
      usage: what the command does and an example; the start of the help.
      with_workdir: False: the command has none.

    Returns:
      The validated config, overrides applied, and the workdir; None without.

    Raises:
      ConfigError: anything wrong with the command line, the config file or a field.
    """
    overrides = [a for a in arguments if re.match(r"--?(no)?config\.", a)]
    command = flags.FlagValues()
    flags.DEFINE_string("config", None, "config file", flag_values=command)
    if with_workdir:
        flags.DEFINE_string("workdir", None, "directory of results", flag_values=command)
    flags.DEFINE_bool("help", False, "help", short_name="h", flag_values=command)
    command.set_gnu_getopt(True)
    try:
        positional = command(["", *(a for a in arguments if a not in overrides)])[1:]
    except flags.Error as error:
        raise ConfigError(f"{_one_line(error)} (--help lists what is allowed)") from None
    if command.help:
        print(f"{usage}\n\nFields of a config (--config.FIELD=VALUE), with the defaults:")
        print("\n".join(f"  {_help_line(path)}" for path in FIELDS))
        raise SystemExit(0)
    if positional:
        raise ConfigError(
            f"command line: got {positional[0]!r}; allowed: --config FILE.py"
            f"{' --workdir DIR' * with_workdir} --config.key=value (with the equals sign)"
        )
    if not command.config:
        raise ConfigError("--config: missing; allowed: a config file such as configs/demo.py")
    if with_workdir and not command.workdir:
        raise ConfigError("--workdir: missing; allowed: a directory for the results")
    config = _load_config_file(command.config)
    for override in overrides:
        _apply_override(config, override)
    validate(config)
    return config, Path(command.workdir) if with_workdir else None


def _load_config_file(argument):
    path, colon, name = argument.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"--config: got {path!r}; allowed: an existing Python file")
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ConfigError("has no function get_config")
        config = get_config(name) if colon else get_config()
    except (Exception, SystemExit) as error:  # a config file is code, and may fail in any way
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"--config: {path}: {kind}{_one_line(error)}") from None
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config: {path}: get_config returned {config!r}, not a ConfigDict")
    config.unlock()
    return config


def _apply_override(config, override):
    """Sets one field from --config.key=value; the flag's type is the field's."""
    name, equals, text = override.lstrip("-").partition("=")
    path = name.removeprefix("no").removeprefix("config.")
    leaves = _flatten(_plain(config))
    field = FIELDS.get(path)
    if field is None and path not in leaves:
        raise ConfigError(_unknown(path))
    if field is not None and field.optional and text in ("None", "none"):
        _set(config, path, None)
        return
    if field is not None and field.optional:
        _set(config, path, config_dict.placeholder(field.kind))  # None says nothing of the type
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=["", override]
        )
        values(["", override])
    except (flags.Error, ValueError, TypeError, KeyError, AttributeError):
        allowed = field.allowed if field else "a value of the same type"
        raise ConfigError(f"config.{path}: got {text!r}; allowed: {allowed}") from None


def _set(config, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent]
    config[name] = value


def _checked(values, prefix):
    """The flat ``values`` with whole numbers made floats where the field is one; or ConfigError."""
    checked = {}
    for path, value in values.items():
        field = FIELDS.get(path)
        if field is None:
            raise ConfigError(_unknown(path, prefix))
        if field.kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        good = type(value) is field.kind and not (field.kind is float and not math.isfinite(value))
        if not (field.optional and value is None) and not (good and field.accepts(value)):
            raise ConfigError(
                f"config.{prefix}{path}: got {_shown(value)}; allowed: {field.allowed}"
            )
        checked[path] = value
    return checked


def _single_run(values):
    """A ConfigDict of the flat ``values``, without the arguments of the other routers."""
    router = values["router"]
    others = tuple(f"routers.{name}." for name in default_arguments() if name != router)
    paths = [path for path in FIELDS if not path.startswith(others)]
    missing = [path for path in paths if path not in values]
    if missing:
        raise ConfigError(f"config.{missing[0]}: missing; start from moe_jax.config.base_config()")
    return ConfigDict(_nest({path: values[path] for path in paths}, {"routers": {router: {}}}))


def _check_combination(run):
    """Checks what no single field shows; ``run`` is one of ``resolve_runs``."""
    model, moe, optimizer = run.model, run.moe, run.optimizer

    def refuse(path, allowed):
        value = _flatten(_plain(run))[path]
        raise ConfigError(f"config.{path}: got {_shown(value)}; allowed: {allowed}")

    if model.width % model.num_heads:
        refuse("model.num_heads", f"divisors of {model.width} (model.width)")
    if (model.width // model.num_heads) % 2:
        refuse(
            "model.num_heads",
            f"an even head size, but {model.width} (model.width) / {model.num_heads} is"
            f" {model.width // model.num_heads}",
        )
    if optimizer.warmup_steps >= run.steps:
        refuse("optimizer.warmup_steps", f"0..{run.steps - 1} (less than steps)")
    if run.data.batch_size % optimizer.accumulate_steps:
        refuse("optimizer.accumulate_steps", f"divisors of {run.data.batch_size} (data.batch_size)")
    if not moe.num_experts:
        return
    if moe.k > moe.num_experts:
        refuse("moe.k", f"1..{moe.num_experts} (moe.num_experts)")
    if moe.every > model.num_layers:
        refuse("moe.every", f"1..{model.num_layers} (model.num_layers)")
    if model.scan_layers and model.num_layers % moe.every:
        refuse("model.num_layers", f"multiples of {moe.every} (moe.every) with model.scan_layers")
    _check_router(run, refuse)


def _check_router(run, refuse):
    """Checks the router's arguments and whether it fits the rest; as ``_check_combination``."""
    moe, arguments = run.moe, run.routers.get(run.router)
    try:
        method = make_router(run.router, k=moe.k, **arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConstantGateWarning)
            method.check(moe.num_experts)
    except ConstantGateWarning:
        if arguments.get("renormalize", False):
            path = f"routers.{run.router}.renormalize"
            refuse(path, f"false when moe.k is {moe.k}: the gate would be 1")
        refuse("moe.k", f"2 or more with router {run.router}: a single renormalised gate is 1")
    except ValueError as error:
        # The messages start with the name of the argument.
        argument = str(error).partition(":")[0]
        section = f"routers.{run.router}" if argument in arguments else "moe"
        raise ConfigError(f"config.{section}.{error}") from None
    if moe.capacity_scope == "shard" and (
        moe.implementation == "einsum" or method.choice_type is not TokenChoice
    ):
        refuse("moe.capacity_scope", "batch with einsum, and where tokens do not choose")
    if method.sees_future == "always" and not moe.allow_future_leak:
        refuse(
            "router",
            "in a causal model, routers that do not see later tokens; or moe.allow_future_leak=true"
            " to train with it all the same (its perplexity is then no likelihood)",
        )
    if method.choice_type in (SoftChoice, ExpertMerge) and moe.capacity_factor is not None:
        refuse("moe.capacity_factor", f"None with router {run.router}, which has no assignments")
    if moe.expert_dropout and not method.can_leave_out_experts:
        refuse("moe.expert_dropout", f"0 with router {run.router}, which needs all its experts")
    if method.needs_token_ids and moe.input_jitter:
        refuse("moe.input_jitter", f"0 with router {run.router}, which does not look at its input")
    if run.losses.load_balance_scope != "batch" and method.default_losses.load_balance is None:
        refuse("losses.load_balance_scope", f"batch with router {run.router}, without such a loss")
    for name, default in method.default_losses._asdict().items():
        if default is None and run.losses[name]:
            refuse(f"losses.{name}", f"None or 0 with router {run.router}, which has no such loss")


def _unknown(path, prefix=""):
    """The message about a key that is no field: the nearest one, and those beside it."""
    section, _, name = path.rpartition(".")
    beside = [p for p in FIELDS if p.rpartition(".")[0] == section]
    inside = [p for p in FIELDS if p.startswith(path + ".")]
    same_name = [p for p in FIELDS if p.rpartition(".")[2] == name]
    near = difflib.get_close_matches(path, same_name or FIELDS, n=1, cutoff=0 if same_name else 0.6)
    if inside:
        return f"config.{prefix}{path}: a section; allowed: its fields {', '.join(inside)}"
    hint = f"; did you mean config.{prefix}{near[0]}?" if near else ""
    sections = sorted({p.split(".")[0] for p in FIELDS})
    names = [p.rpartition(".")[2] for p in beside] if beside and section else sections
    where = f"config.{section}" if beside and section else "config"
    return f"config.{prefix}{path}: unknown field{hint} (allowed in {where}: {', '.join(names)})"


def _help_line(path):
    field = FIELDS[path]
    return f"{path}={_shown(field.default)}  {field.help} [{field.allowed}]"


def _shown(value):
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f"{value}"


def _plain(config):
    """The config as nested dicts."""
    return config.to_dict()


def _nest(flat, sections):
    """{"a.b": 1} as {"a": {"b": 1}}, added to the nested dict ``sections``."""
    for path, value in flat.items():
        section = sections
        *parents, name = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return sections


def _flatten(values, prefix=""):
    """{"a": {"b": 1}} as {"a.b": 1}; an empty dict is nothing."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _one_line(error):
    return " ".join(str(error).split())
