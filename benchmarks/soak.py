"""A training run that is killed again and again, beside one that is left alone.

The disturbed run is started on another number of processes and devices every time, and killed after
a random time: by SIGKILL or SIGTERM, to one process or to all. When the minutes are over it is left
to finish. Then every row of its metrics must be there once and say what the undisturbed run says,
up to rounding: devices add up in other orders, and what differs in the last digit grows while a
model learns, at the latest where a token changes its experts. How far, a third run shows, which is
left alone on two devices: the disturbed one may differ a few times as much.

Example:
  python -m benchmarks.soak --minutes 30 --output runs/benchmarks/soak
"""

import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import command, report
from moe_jax.checkpoints import saved_steps
from moe_jax.train.log import read_metrics

MODULE = "benchmarks.soak"
_RUN = "moe"
_ROOT = Path(__file__).resolve().parents[1]
_CONFIG = {
    "evaluate_every_steps": 100,
    "evaluate_batches": 4,
    "checkpoint_every_steps": 5,
    "log_every_steps": 1,
    "data.batch_size": 16,
    "data.tokenizer": "byte",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 10,
    "model.num_layers": 2,
}
_QUICK = {"model.width": 32, "moe.expert_width": 32, "data.sequence_length": 32}
# Of the loss, relative: the disturbed run against the third one, and what no run needs to go below.
_TIMES, _FLOOR = 5, 1e-5
_END_SECONDS = 240


class Layout(NamedTuple):
    """How a life of the run is started."""

    processes: int
    devices: int
    mesh: dict[str, int]


LAYOUTS = (
    Layout(1, 1, {}),
    Layout(1, 2, {"data": 2}),
    Layout(1, 8, {"data": 1, "expert": 8}),
    Layout(2, 4, {"data": 2, "expert": 2}),
    Layout(2, 8, {"data": 1, "fsdp": 4, "expert": 2}),
    Layout(4, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
)
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    record = report.record(MODULE, arguments)
    fields = _CONFIG | {"steps": options.steps} | (_QUICK if options.quick else {})
    # A config with variants has a folder for each.
    alone, twin, disturbed = (
        options.output / name / _RUN for name in ("alone", "twin", "disturbed")
    )
    for layout, workdir in ((LAYOUTS[0], alone), (LAYOUTS[1], twin)):
        print(f"the undisturbed run on {layout.devices} device(s)", flush=True)
        [code] = _end(_start(layout, workdir, fields), None)
        if code:
            print(f"error: the undisturbed run ended with {code}", file=sys.stderr)
            return 1
    lives = _disturb(disturbed, fields, options)
    _write_csv(options.output / "soak.csv", lives)
    difference, missing = compare(read_metrics(alone), read_metrics(disturbed))
    rounding, _ = compare(read_metrics(alone), read_metrics(twin))
    _draw(options.output / "soak.png", alone, disturbed, lives)
    passed = not missing and difference.max() <= max(_FLOOR, _TIMES * rounding.max())
    summary = {
        "lives": len(lives),
        "steps": options.steps,
        "rows_missing_or_twice": missing,
        "largest_relative_difference_of_loss": float(difference.max()),
        "median_relative_difference_of_loss": float(np.median(difference)),
        "largest_of_two_undisturbed_runs": float(rounding.max()),
        "median_of_two_undisturbed_runs": float(np.median(rounding)),
        "passed": bool(passed),
    }
    (options.output / "soak.json").write_text(json.dumps(record | summary, indent=1))
    print(json.dumps(summary, indent=1))
    return 0 if passed else 1


def compare(expected: list[dict], got: list[dict]) -> tuple[np.ndarray, int]:
    """Relative differences of the training loss by step; how many rows are missing or twice."""

    def losses(rows):
        return {(row["step"], row["split"]): row.get("loss") for row in rows}

    wanted, found = losses(expected), losses(got)
    missing = len(wanted.keys() ^ found.keys()) + len(got) - len(found)
    steps = [key for key in wanted if key[1] == "train" and key in found]
    return np.array(
        [abs(found[k] - wanted[k]) / abs(wanted[k]) for k in steps] or [np.inf]
    ), missing


def _disturb(workdir, fields, options):
    """Starts and kills the run until the time is over, then lets it finish; a row for each life."""
    rng = random.Random(options.seed)
    lives, over = [], time.monotonic() + 60 * options.minutes
    while max(saved_steps(workdir / "checkpoints"), default=0) < options.steps:
        layout = rng.choice(LAYOUTS)
        if lives and layout == LAYOUTS[lives[-1]["layout"]]:
            continue
        last = time.monotonic() > over
        number, to_all = rng.choice(SIGNALS), rng.random() < 0.5
        seconds = None if last else rng.uniform(*options.seconds)
        began = time.monotonic()
        processes = _start(layout, workdir, fields)
        codes = _end(processes, seconds, number, processes if to_all else [rng.choice(processes)])
        step = max(saved_steps(workdir / "checkpoints"), default=0)
        lives.append(
            dict(
                layout=LAYOUTS.index(layout),
                processes=layout.processes,
                devices=layout.devices,
                mesh=" ".join(f"{axis}={size}" for axis, size in layout.mesh.items()),
                seconds=round(time.monotonic() - began, 1),
                signal="none" if last else f"{number.name} to {'all' if to_all else 'one'}",
                exit_codes=" ".join(map(str, codes)),
                step=step,
            )
        )
        print("  ".join(f"{name} {value}" for name, value in lives[-1].items()), flush=True)
        if last:
            break  # with all steps, or never
    return lives


def _start(layout, workdir, fields):
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    share = layout.devices // layout.processes
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={share}",
        "JAX_PLATFORMS": "cpu",
        # So that most lives are spent in training.
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parents[1].resolve() / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    fields = fields | {f"mesh.{axis}": size for axis, size in layout.mesh.items()}
    line = [sys.executable, "-m", "moe_jax.train", "--config", f"configs/demo.py:{_RUN}"]
    line += ["--workdir", str(workdir.parent.resolve())]
    line += [f"--config.{name}={value}" for name, value in fields.items()]
    processes = []
    for index in range(layout.processes):
        cluster = ["--coordinator", f"localhost:{port}", "--process_index", str(index)]
        cluster += ["--num_processes", str(layout.processes)]
        folder = workdir.parent
        folder.mkdir(exist_ok=True)
        with (folder.parent / f"{folder.name}-{index}.log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    line + (cluster if layout.processes > 1 else []),
                    cwd=_ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def _end(processes, seconds, number=None, targets=()):
    """Exit codes, after the signal to the targets; what hangs then is killed. None: no signal."""
    try:
        for process in processes:
            process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        for process in targets:
            process.send_signal(number)
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def _write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _draw(path, alone, disturbed, lives):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    curves = []
    for directory, style in ((alone, "-"), (disturbed, "--")):
        rows = [row for row in read_metrics(directory) if row["split"] == "train"]
        curves.append({row["step"]: row["loss"] for row in rows})
        above.plot(curves[-1].keys(), curves[-1].values(), style, label=directory.parent.name)
    for life in lives[:-1]:
        above.axvline(life["step"], color="0.8", linewidth=0.8, zorder=0)
    steps = sorted(curves[0].keys() & curves[1].keys())
    differences = [abs(curves[0][s] - curves[1][s]) / curves[0][s] for s in steps]
    below.semilogy(steps, np.maximum(differences, 1e-9))
    above.set(ylabel="training loss (nats)", title=f"{len(lives)} lives; lines: where one ended")
    above.legend()
    below.set(xlabel="step", ylabel="relative difference")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _parse(arguments):
    parser = command.parser(MODULE, __doc__, quick="a tiny model")
    help = "after which it is left alone (default: %(default)s)"
    parser.add_argument("--minutes", type=float, default=30.0, help=help)
    help = "of the run (default: %(default)s)"
    parser.add_argument("--steps", type=command.positive, default=600, help=help)
    help = "shortest and longest life (default: 20 60)"
    parser.add_argument("--seconds", type=float, nargs=2, default=(20.0, 60.0), help=help)
    help = "of the layouts, times and signals (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=help)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
