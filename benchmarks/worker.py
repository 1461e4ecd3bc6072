"""A process that trains one model on request, so that its memory is its own.

It reads a line of JSON, {"config", "implementation"}, makes the model and writes a line when it is
ready. Then, for each number of steps that it reads, it takes these steps and writes another line.
An error is the last line: {"skipped": message}.
"""

import json
import resource
import sys
import time
from pathlib import Path

from ml_collections import ConfigDict

from benchmarks import models


def peak_mib() -> float:
    """The largest resident memory that this process has had."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    # Where there is this file, ru_maxrss starts with the size of the process that started this one.
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def work() -> None:
    """Answers requests until the input ends."""
    try:
        request = json.loads(sys.stdin.readline())
        config, implementation = ConfigDict(request["config"]), request["implementation"]
        _import_libraries(implementation)
        start_mib = peak_mib()
        if implementation:
            training = models.theirs(config, implementation)
        else:
            training = models.ours(config)
        _say(start_mib=start_mib, parameters=training.parameters)
        _train(training, models.batches(config))
    except Exception as error:
        _say(skipped=f"{type(error).__name__}: {' '.join(str(error).split())}"[:160])


def _train(training, batches):
    taken = 0
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            training.step(batches[taken % len(batches)])
            taken += 1
        loss = training.loss()
        _say(seconds=time.perf_counter() - start, loss=loss, peak_mib=peak_mib())


def _say(**values):
    print(json.dumps(values), flush=True)


def _import_libraries(implementation):
    """What the model needs anyway, so that it is part of the memory at the start."""
    if implementation:
        import torch
        import transformers.models.llama.modeling_llama
        import transformers.models.mixtral.modeling_mixtral  # noqa: F401

        torch.zeros(1)
    else:
        import jax

        import moe_jax.train.build  # noqa: F401

        jax.devices()


if __name__ == "__main__":
    work()
