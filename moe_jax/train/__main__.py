"""The command python -m moe_jax.train."""

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import absl.logging
import jax

from moe_jax.checkpoints import CheckpointError
from moe_jax.config import ConfigError, parse_command_line, resolve_runs
from moe_jax.train.build import explain_backend, make_run_mesh
from moe_jax.train.feed import DataError
from moe_jax.train.flags import USAGE as PROCESSES_USAGE
from moe_jax.train.flags import take_flags
from moe_jax.train.log import LogError
from moe_jax.train.loop import TrainingError, train
from moe_jax.train.memory import keep_freed_memory
from moe_jax.train.processes import connect, is_first, is_lost, one_line, wait_for_all
from moe_jax.train.restarts import run_with_restarts
from moe_jax.train.signals import StopRequest
from moe_jax.train.workdir import prepare_workdir, trained_by_one

USAGE = (
    """\
Trains the language model of a config, one variant after the other if it has variants.

usage: python -m moe_jax.train --config FILE.py[:ARGUMENT] --workdir DIR [--config.FIELD=VALUE ...]
                               [--max_restarts N] [--profile]
                               [--distributed, or the three flags below]

example: python -m moe_jax.train --config configs/demo.py --workdir runs/demo --config.steps=100

The same command again goes on from the last checkpoint in DIR, and does nothing once finished.
SIGINT (Ctrl-C) and SIGTERM finish the step, save a checkpoint and exit; a second one exits at once.
Exit codes: 0 finished, 1 an error (one line on stderr), 75 an error that may pass (data that does
not come or cannot be read, another process of the run is gone), 130 stopped by SIGINT, 143 by
SIGTERM. With --max_restarts N, a parent process starts the training again when it died of another
signal or ended with 75, at most N times in a row without a new checkpoint; the exit code is the
last one's. --profile traces five steps, after the first five of the process, into DIR/profile.

DIR (or DIR/VARIANT) gets config.json, summary.json (where the time went), metrics.jsonl,
metrics.csv, routing.npz (load and dropped assignments by step, layer and expert), tensorboard/ and
checkpoints/.

"""
    + PROCESSES_USAGE
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    workdir = None
    try:
        flags, rest = take_flags(arguments)
        if flags.max_restarts:
            # The accelerators are the child's: whoever asks for them first has them.
            jax.config.update("jax_platforms", "cpu")
            _, workdir = parse_command_line(rest, usage=USAGE)
            command = [sys.executable, "-m", "moe_jax.train", *flags.child]
            return run_with_restarts(command, workdir, max_restarts=flags.max_restarts)
        connect(flags.cluster)  # before a config is checked, which asks jax for shapes
        config, workdir = parse_command_line(rest, usage=USAGE)
        for run in resolve_runs(config).values():
            make_run_mesh(run)
            if run.moe.num_experts and run.moe.backend:
                explain_backend(run)
        if not is_first():  # the first one writes config.json, which the others are to have too
            wait_for_all("the workdir")
        runs = prepare_workdir(workdir, config, write=is_first())
        if is_first():
            wait_for_all("the workdir")
        with StopRequest() as stop:
            for directory, run in runs.items():
                variant = "" if directory == workdir else directory.name
                alone = trained_by_one(directory) if is_first() else contextlib.nullcontext()
                with alone:
                    train(run, directory, stop=stop, name=variant, profile=flags.profile)
                if stop.signal:
                    break
    except (ConfigError, CheckpointError, LogError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL if is_lost(error) else 1
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error.filename or workdir}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_lost(error):
            raise
        print(f"error: another process of this run is gone: {one_line(error)}", file=sys.stderr)
        return os.EX_TEMPFAIL
    if stop.signal and is_first():
        command = shlex.join(["python", "-m", "moe_jax.train", *arguments])
        print(f"stopped; to go on, run the same command again:\n  {command}", flush=True)
    return stop.exit_code


def _silence_libraries():
    """Leaves it to this command to tell of an error."""
    # Orbax logs errors with their stack before it raises them,
    absl.logging.set_verbosity(absl.logging.FATAL)
    # and when one write fails, it leaves the others to fail on their own.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def show_others(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code of ``main``."""
    sys.stdout.flush()
    if code:
        # No clean-up: a writer on a full disk would add its own complaints, and a reader that hangs
        # or a process that is gone would be waited for.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _silence_libraries()
    keep_freed_memory()
    leave(main(sys.argv[1:]))
