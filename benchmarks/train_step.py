"""The whole train step of the demo model against the same model of Hugging Face transformers.

Forward, loss, backward, clipping and AdamW on the same tokens, in float32. Every contender runs in
a process of its own, so that its peak memory is its own, and the processes take turns.

What is the same: layers, width, heads, vocabulary, tied embeddings, experts, k, sequences, rotary
positions, RMSNorm, load-balance loss, AdamW with decay on matrices only. The closest model of
transformers is Mixtral (multi-head here: as many key and value heads as query heads), and Llama for
the dense one. Their feed-forwards are SwiGLU, ours GELU: they get two thirds of the width, which
makes parameters and FLOPs equal up to two percent. Our model in SwiGLU at that width, with
Mixtral's gates, is measured as well: it has the same function and parameters as Mixtral.

Example:
  python -m benchmarks.train_step --rounds 10 --steps 10 --output runs/benchmarks/train_step
  python -m benchmarks.train_step --profile
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks import command, models, report
from benchmarks.step_profile import profile_step
from benchmarks.timing import quartiles
from benchmarks.torch_setup import missing

MODULE = "benchmarks.train_step"
_ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {
    "contender": "contender",
    "parameters": "parameters",
    "tokens_per_second": "tokens/s",
    "ms_per_step": "ms per step",
    "iqr_ms": "IQR",
    "speed_ratio": "speed x ours",
    "peak_mib": "peak MiB",
    "growth_mib": "of it after imports",
    "memory_ratio": "memory x ours",
    "last_loss": "last loss",
    "skipped": "not measured because",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    record = report.record(MODULE, arguments)
    if options.profile:
        profile_step(options.output, record, rounds=options.rounds, quick=options.quick)
        return 0
    names = list(models.CONTENDERS)
    if lacking := missing():
        print(f"without the models of transformers: not installed: {lacking}", file=sys.stderr)
        names = [name for name in names if not models.CONTENDERS[name].implementation]
    rows = _measure(names, options)
    report.write_record(options.output / "machine.json", record)
    report.write_csv(options.output / "train_step.csv", rows)
    columns = dict(COLUMNS)
    if not any(row["skipped"] for row in rows):
        del columns["skipped"]
    text = f"# Train step of the demo\n\n{report.describe(record)}\n{_LEGEND}\n\n"
    text += report.markdown(rows, columns) + "\n"
    (options.output / "train_step.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


_LEGEND = """
`speed x ours`: median over the rounds of tokens/s over those of `moe_jax moe` in the same round.
`memory x ours`: peak resident memory over that of `moe_jax moe`, libraries included."""


def _parse(arguments):
    parser = command.parser(
        MODULE, __doc__, quick="a tiny model, 2 rounds of 2 steps, to see that all runs"
    )
    parser.add_argument(
        "--rounds", type=command.positive, default=10, help="of all contenders (default: 10)"
    )
    parser.add_argument(
        "--steps", type=command.positive, default=10, help="a contender's turn (default: 10)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="instead: where the time of our own step goes"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 2, 2
    return options


class _Worker:
    """A contender in its process: it answers a line with a line of JSON.

    Attributes:
      tokens: of a step.
      facts: what it said when it was ready: {"start_mib", "parameters"}.
      turns: its answers, one a turn: {"seconds", "loss", "peak_mib"}.
      skipped: why it takes no more turns, or "".
    """

    def __init__(self, config, implementation):
        worker = [sys.executable, "-m", "benchmarks.worker"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = subprocess.Popen(worker, cwd=_ROOT, **pipes)
        self.turns, self.skipped = [], ""
        self.tokens = config.data.batch_size * config.data.sequence_length
        request = {"config": config.to_dict(), "implementation": implementation}
        self.facts = self._ask(json.dumps(request))

    def take_turn(self, steps):
        """Runs that many steps."""
        if not self.skipped:
            self.turns.append(self._ask(str(steps)))

    def close(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request):
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"skipped": f"exit status {self._process.wait()}"}
        self.skipped = answer.get("skipped", "")
        return answer


def _measure(names, options):
    """A row for each contender."""
    workers = {}
    for name in tqdm(names, "start"):
        contender = models.CONTENDERS[name]
        workers[name] = _Worker(contender.config(options.quick), contender.implementation)
        workers[name].take_turn(2)  # compilation, and a step after it
        workers[name].turns.clear()
    order = np.random.default_rng(0)
    for _ in tqdm(range(options.rounds), "rounds"):
        for name in order.permutation(names):
            workers[name].take_turn(options.steps)
    for worker in workers.values():
        worker.close()
    return [_row(name, workers[name], workers[names[0]], options.steps) for name in names]


def _row(name, worker, ours, steps):
    row = dict.fromkeys(COLUMNS) | {"contender": name, "skipped": worker.skipped}
    if worker.skipped:
        return row
    seconds = np.array([turn["seconds"] for turn in worker.turns])
    q1, median, q3 = quartiles(1e3 * seconds / steps)
    row |= {
        "parameters": worker.facts["parameters"],
        "tokens_per_second": worker.tokens / (median / 1e3),
        "ms_per_step": median,
        "iqr_ms": q3 - q1,
        "peak_mib": worker.turns[-1]["peak_mib"],
        "growth_mib": worker.turns[-1]["peak_mib"] - worker.facts["start_mib"],
        "last_loss": worker.turns[-1]["loss"],
    }
    if not ours.skipped:
        our_seconds = np.array([turn["seconds"] for turn in ours.turns])
        row["speed_ratio"] = float(np.median(our_seconds / seconds))
        row["memory_ratio"] = row["peak_mib"] / ours.turns[-1]["peak_mib"]
    return row


if __name__ == "__main__":
    sys.exit(main())
