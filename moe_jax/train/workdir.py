"""The directory of results: which run lives where, and that it stays the same run."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from moe_jax.checkpoints import saved_steps
from moe_jax.config import (
    ConfigError,
    config_from_json,
    config_to_json,
    differences,
    resolve_runs,
)


def prepare_workdir(
    workdir: Path, config: ConfigDict, *, write: bool = True
) -> dict[Path, ConfigDict]:
    """Makes the workdir and writes config.json, or checks that it holds runs of this config.

    A run without variants lives in the workdir itself, each variant in a folder of its name with
    its own config.json. Variants may be added to a workdir later. Without ``write`` it is checked
    only, and must have been made.

    Returns:
      {run directory: config of the single run}, in the order to train them.

    Raises:
      ConfigError: the workdir cannot be used, or holds runs of another config; names the fields
        that differ with both values.
    """
    runs = {workdir / name: run for name, run in resolve_runs(config).items()}
    try:
        if write:
            workdir.mkdir(parents=True, exist_ok=True)
        _check_same_runs(workdir, runs)
        if not write:
            _check_there(runs)
            return runs
        if config.get("variants"):
            _write(workdir, config_to_json(config))
        for directory, run in runs.items():
            directory.mkdir(exist_ok=True)
            _write(directory, config_to_json(run))
    except OSError as error:
        raise ConfigError(f"--workdir: got {str(workdir)!r}: {error.strerror}") from None
    return runs


@contextlib.contextmanager
def trained_by_one(directory: Path) -> Iterator[None]:
    """Within it no other command trains in ``directory``: two would cut each other's files.

    The lock is gone with the process, however that ends. A file system without locks has none.

    Raises:
      ConfigError: another process trains there.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--workdir: another process trains in {directory}; allowed: another workdir, or"
                " this one when that process has ended"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def _check_there(runs):
    """Refuses a place that the process which writes does not share with this one."""
    for directory in runs:
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"--workdir: {directory} has no config.json of the first process; allowed: a"
                " directory that all processes see"
            )


def _check_same_runs(workdir, runs):
    for directory in runs:
        checkpoints = directory / "checkpoints"
        if checkpoints.exists() and not checkpoints.is_dir():
            raise ConfigError(f"--workdir: {checkpoints} is a file; allowed: a directory")
        if saved_steps(checkpoints) and not (directory / "config.json").exists():
            raise ConfigError(
                f"--workdir: {directory} has checkpoints but no config.json that says what they are"
                " of; allowed: another workdir, or this one with its config.json"
            )
    before = _read(workdir)
    if before is None:
        return
    for name in before.get("variants") or [""]:
        if workdir / name not in runs:
            what = f"a variant {name!r}" if name else "a run without variants"
            raise ConfigError(
                f"--workdir: {workdir} has {what}, and this config has not; allowed: another"
                " workdir, or variants beside those that it has"
            )
    for directory, run in runs.items():
        before = _read(directory)
        changed = differences(before, run) if before is not None else []
        if changed:
            raise ConfigError(
                f"--workdir: {directory} was made with another config ({'; '.join(changed)});"
                " allowed: another workdir, or the config that it was made with"
            )


def _read(directory):
    path = directory / "config.json"
    try:
        if not path.exists():
            return None
        config = config_from_json(path.read_bytes())
        if not isinstance(config.get("variants", ConfigDict()), ConfigDict):
            raise ConfigError("config.variants: allowed: a dict by name")
        return config
    except ConfigError as error:
        raise ConfigError(f"--workdir: {path}: {error}") from None


def _write(directory, text):
    temporary = directory / "config.json.tmp"
    temporary.write_text(text)
    os.replace(temporary, directory / "config.json")
