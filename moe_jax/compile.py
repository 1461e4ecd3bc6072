"""The command python -m moe_jax.compile: what a train step costs on chips that are not there."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import absl.logging
import jax

from moe_jax.compiling.collectives import find_collectives
from moe_jax.compiling.estimate import remedies, step_time, summarize
from moe_jax.compiling.topology import ALLOWED, TopologyError, parse_topology
from moe_jax.compiling.train_step import Program, bytes_per_device, compile_train_step
from moe_jax.config import CommandParser, ConfigError, parse_command_line, resolve_runs
from moe_jax.kernels.targets import ENVIRONMENT
from moe_jax.models.accounting import count_parameters, forward_flops_per_token

DESCRIPTION = f"""\
Compiles the whole sharded train step of a config for accelerators that need not be there, and
says what it would cost: memory by device, arithmetic, what is sent over the network, and from
published figures of the chips an estimate of the time of a step. No data is read, and nothing is
allocated. The compilers: pip install -e '.[compile]' (and [kernels] for those of tokamax).

usage: python -m moe_jax.compile --config FILE.py[:ARGUMENT] --topology NAME [--json FILE]
         [--hlo FILE] [--config.FIELD=VALUE ...]

topologies: {ALLOWED}
  --json FILE  writes the report there too, as numbers
  --hlo FILE   writes the optimised program there

example: python -m moe_jax.compile --config configs/demo.py:moe --topology v5e:2x4

Exit codes: 0 compiled and fits, 1 an error or too little memory (one line on stderr)."""
_SAY_EVERY_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    # tokamax warns of every shape that nobody has tuned it for.
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        options, config = _parse(arguments)
        topology = parse_topology(options.topology)
        runs = resolve_runs(config)
        if len(runs) > 1:
            raise ConfigError(
                f"--config: got the variants {', '.join(runs)}; allowed: one run, such as"
                f" {options.config.partition(':')[0]}:{next(iter(runs))}"
            )
        for path in filter(None, (options.json, options.hlo)):
            path.parent.mkdir(parents=True, exist_ok=True)  # not after minutes of compiling
        return _report(next(iter(runs.values())), topology, options)
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, TopologyError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _report(config, topology, options):
    with _Progress() as progress:
        progress.say(f"preparing the model for {topology.name}")
        try:
            program = compile_train_step(config, topology, progress.say)
        except jax.errors.JaxRuntimeError as error:
            return _refused(config, topology, str(error))
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, ConfigError | TopologyError):
                raise
            line = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"the train step cannot be traced for {topology.name}: {line} (another"
                " --config.moe.backend may do)"
            ) from None
    text = program.compiled.as_text()
    if options.hlo:
        options.hlo.write_text(text, encoding="utf-8")
    report = {"config": options.config} | describe(config, topology, program, text)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(as_text(report))
    if not report["memory"]["fits"]:
        print(_too_much(config, topology, program.mesh.shape), file=sys.stderr)
        return 1
    return 0


def describe(config, topology, program: Program, text: str) -> dict:
    """All that is said of a compiled train step; bytes, seconds and FLOPs are plain numbers."""
    mesh, chip = dict(program.mesh.shape), topology.chip
    params = program.state.params
    tokens = config.data.batch_size * config.data.sequence_length
    k = config.moe.k if config.moe.num_experts else 0
    parameters = count_parameters(params, k)
    forward = forward_flops_per_token(params, k, config.data.sequence_length).total
    model_flops = 3 * forward * tokens
    traffic = summarize(find_collectives(text), mesh, topology)
    memory = _memory(program, chip.hbm_bytes / chip.num_devices)
    moved = memory["arguments"] + memory["outputs"]
    moved += 2 * memory["temporaries"] * config.optimizer.accumulate_steps
    # The forward pass is a third of the step, and comes once more with remat.
    flops = model_flops * (4 / 3 if config.model.remat else 1) / program.mesh.size
    seconds = step_time(topology, flops=flops, hbm_bytes=moved, traffic=traffic)
    peak = model_flops / (chip.peak_flops * topology.num_chips)
    costs = program.compiled.cost_analysis() or {}
    return {
        "topology": topology.name,
        "chip": chip._asdict(),
        "num_chips": topology.num_chips,
        "mesh": mesh,
        "jax": jax.__version__,
        "backend": program.backend,
        "compile_seconds": program.seconds,
        "parameters": parameters._asdict(),
        "tokens_per_step": tokens,
        "memory": memory,
        "flops": {
            "model_step": model_flops,
            "compiler_device_loops_once": costs.get("flops"),
        },
        "traffic": [row._asdict() for row in traffic],
        "estimate": {
            **seconds._asdict(),
            "overlapped": seconds.overlapped,
            "serial": seconds.serial,
            "mfu_overlapped": peak / seconds.overlapped,
            "mfu_serial": peak / seconds.serial,
        },
    }


def _memory(program, capacity):
    """Bytes of one device. The new state takes the place of the old, so it counts once."""
    stats = program.compiled.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    total += stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    return {
        "parameters": bytes_per_device(program.state.params),
        "optimizer": bytes_per_device(program.state.opt_state),
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
        "total": total,
        "capacity": capacity,
        "fits": total <= capacity,
    }


def as_text(report: dict) -> str:
    """The report for people."""
    memory, flops, estimate = report["memory"], report["flops"], report["estimate"]
    parameters, chip = report["parameters"], report["chip"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
    device_s = "device" if chip["num_devices"] == 1 else "devices"
    lines = [
        f"{report['topology']}: {report['num_chips']} chips ({chip['name']},"
        f" {chip['num_devices']} {device_s} of jax each); mesh {mesh}",
        f"parameters {parameters['total']:,}, active {parameters['active']:,};"
        f" {report['tokens_per_step']:,} tokens per step",
        *([report["backend"]] if report["backend"] else []),
        f"compiled in {report['compile_seconds']:.0f} s with jax {report['jax']}",
        "",
        "Memory of one device",
        *_memory_lines(memory),
        "",
        "Arithmetic",
        f"  the model's, in one step    {_scaled(flops['model_step'], 'FLOP')}"
        " (three times the forward pass; k experts per token)",
    ]
    if flops["compiler_device_loops_once"]:
        lines.append(
            f"  the compiler's, one device  {_scaled(flops['compiler_device_loops_once'], 'FLOP')}"
            " (the body of a loop counts once, a kernel by its longest input)"
        )
    lines += ["", "Sent by one device in a step", *_traffic_lines(report["traffic"])]
    lines += [
        "",
        "Estimate from published figures of the chip, not a measurement",
        f"  compute {_ms(estimate['compute'])}, HBM {_ms(estimate['hbm'])},"
        f" network {_ms(estimate['network'])}",
        f"  step {_ms(estimate['overlapped'])} if they overlap (MFU"
        f" {estimate['mfu_overlapped']:.0%}), {_ms(estimate['serial'])} one after the other (MFU"
        f" {estimate['mfu_serial']:.0%})",
    ]
    return "\n".join(lines)


def _memory_lines(memory):
    share = f"{memory['total'] / memory['capacity']:.1%}"
    rows = {
        "parameters": memory["parameters"],
        "optimizer state": memory["optimizer"],
        "temporaries": memory["temporaries"],
        "program": memory["code"],
        "in all": memory["total"],
    }
    notes = {
        "temporaries": f"  activations, and gradients of {_scaled(memory['parameters'])}",
        "in all": f"  of {_scaled(memory['capacity'])} ({share}):"
        f" {'fits' if memory['fits'] else 'does not fit'}",
    }
    lines = [f"  {name:<16} {_scaled(size):>9}{notes.get(name, '')}" for name, size in rows.items()]
    sizes = (_scaled(memory[name]) for name in ("arguments", "outputs", "aliased"))
    return [
        *lines,
        "  by the compiler: arguments {}, outputs {}, of which {} in place".format(*sizes),
    ]


def _traffic_lines(traffic):
    if not traffic:
        return ["  nothing"]
    lines = [f"  {'kind':<20} {'mesh axes':<22} {'times':>7} {'bytes':>10}"]
    for row in traffic:
        notes = "" if row["certain"] else "  (a loop of unknown length, counted once)"
        if row["far_bytes"]:
            notes += f"  (between nodes: {_scaled(row['far_bytes'])})"
        lines.append(
            f"  {row['kind']:<20} {row['axes']:<22} {row['executions']:>7}"
            f" {_scaled(row['bytes_sent']):>10}{notes}"
        )
    total = sum(row["bytes_sent"] for row in traffic)
    return [*lines, f"  {'in all':<51} {_scaled(total):>10}"]


def _refused(config, topology, message):
    """What the compiler says of a program that it does not take; returns the exit code."""
    if "RESOURCE_EXHAUSTED" not in message and "out of memory" not in message.lower():
        line = " ".join(message.split())[:300]
        raise TopologyError(f"--topology: {topology.name}: the compiler refuses: {line}")
    used = re.search(r"Used [\d.]+\w? of [\d.]+\w? \w+", message)
    print(f"the compiler: {used[0] if used else ' '.join(message.split())[:200]}")
    sizes = config.mesh
    devices = topology.num_chips * topology.chip.num_devices
    shared = sizes.fsdp * sizes.expert * sizes.tensor
    mesh = dict(data=devices // shared, fsdp=sizes.fsdp, expert=sizes.expert, tensor=sizes.tensor)
    print(_too_much(config, topology, mesh), file=sys.stderr)
    return 1


def _too_much(config, topology, mesh_shape):
    return (
        f"error: the step does not fit the memory of {topology.chip.name}; what helps: "
        + "; ".join(remedies(config, dict(mesh_shape)))
    )


def _scaled(number, unit="B"):
    """Three digits with a prefix of powers of 1000."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= 999.5 and len(prefixes) > 1:
        number, prefixes = number / 1000, prefixes[1:]
    digits = 0 if number >= 99.95 or not prefixes[0] else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {prefixes[0]}{unit}"


def _ms(seconds):
    return f"{seconds * 1e3:,.1f} ms"


class _Progress:
    """Lines on stderr that say what is being done, and from time to time that it still is."""

    def __init__(self):
        self._began = time.perf_counter()
        self._doing = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._remind, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._done.set()

    def say(self, doing: str) -> None:
        self._doing = doing
        print(f"[{time.perf_counter() - self._began:4.0f} s] {doing}", file=sys.stderr, flush=True)

    def _remind(self):
        while not self._done.wait(_SAY_EVERY_SECONDS):
            self.say(self._doing if self._doing.startswith("still") else f"still {self._doing}")


def _parse(arguments):
    """The options, and the config."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--topology")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path)
    options, others = parser.parse_known_args(arguments)
    rest = [*others, *([f"--config={options.config}"] if options.config else [])]
    config, _ = parse_command_line(rest, usage=DESCRIPTION, with_workdir=False)
    if not options.topology:
        raise TopologyError(f"--topology: missing; allowed: {ALLOWED}")
    return options, config


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # jax has read the environment of this process, when it was imported.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **ENVIRONMENT}
        command = [sys.executable, "-m", "moe_jax.compile", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    # The compilers do not look at signals, and there is nothing to be saved.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
