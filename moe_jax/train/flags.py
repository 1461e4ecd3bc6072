"""The flags of the trainer's own command line, beside those that every command has."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.config import CommandParser, ConfigError

USAGE = """\
Several processes: run the same command in each, with a workdir that all of them see.
  --distributed             find the others as SLURM, Open MPI, Kubernetes or a TPU pod tells
  --coordinator HOST:PORT   or by hand: the first process listens there,
  --num_processes N         so many are started,
  --process_index I         and this is number I of 0..N-1"""


class Cluster(NamedTuple):
    """How to find the other processes; all None: as the environment tells."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_index: int | None = None


class Flags(NamedTuple):
    """What a command line asks of the trainer.

    Attributes:
      cluster: the other processes; None: there are none.
      profile: some steps are to be traced.
      max_restarts: of a child that trains; 0: this process trains.
      child: the command line of that child, which is not to start one of its own.
    """

    cluster: Cluster | None
    profile: bool
    max_restarts: int
    child: list[str]


def take_flags(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """The trainer's own flags, and the rest of the command line.

    Raises:
      ConfigError: a flag without the others that it needs, or a value that is not allowed.
    """
    restarts = _parser()
    restarts.add_argument("--max_restarts", type=_whole_number, default=0)
    parser = _parser(parents=[restarts])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=_whole_number)
    parser.add_argument("--process_index", type=_whole_number)
    found, rest = parser.parse_known_args(list(arguments))
    child = restarts.parse_known_args(list(arguments))[1]
    return Flags(_cluster(found), found.profile, found.max_restarts, child), rest


def _cluster(found):
    cluster = Cluster(found.coordinator, found.num_processes, found.process_index)
    if all(value is None for value in cluster):
        return cluster if found.distributed else None
    if found.distributed or any(value is None for value in cluster):
        raise ConfigError(
            "--distributed: allowed: alone, or instead of it all of --coordinator HOST:PORT,"
            " --num_processes N, --process_index I"
        )
    if cluster.process_index >= cluster.num_processes:
        raise ConfigError(
            f"--process_index: got {cluster.process_index}; allowed: 0..N-1 with --num_processes"
            f" {cluster.num_processes}"
        )
    return cluster


def _parser(parents=()):
    return CommandParser(add_help=False, allow_abbrev=False, parents=list(parents))


def _whole_number(text):
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: whole numbers >= 0")
    return int(text)
