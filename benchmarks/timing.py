"""Interleaved timing: the contenders take turns, so that a slow minute meets all of them."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

# A library's threads may spin a moment after its work: the next contender waits until they sleep.
_SETTLE_SECONDS = 0.005
_FEWEST_RUNS = 3


class NotMeasured(Exception):
    """A contender that cannot run here; the message is the reason, for the table."""


class Program(NamedTuple):
    """Something ready to be timed.

    Attributes:
      run: does the work, all of it before it returns, and returns its outputs.
      calls: how often one run does the work.
      temp_bytes, compile_seconds: of a compiled program.
    """

    run: Callable[[], Any]
    calls: int = 1
    temp_bytes: int | None = None
    compile_seconds: float | None = None


class Contender(NamedTuple):
    """What is measured under one name.

    Attributes:
      name: unique.
      library: what computes it.
      make: builds the program; whatever it raises is the reason why it is not measured.
      own_dense: name of the dense layer of the same library and activation.
      swiglu: three matrices instead of two.
      same_as: name of a contender that computes the same function; "" if none does.
    """

    name: str
    library: str
    make: Callable[[], Program]
    own_dense: str
    swiglu: bool = False
    same_as: str = ""


class Result(NamedTuple):
    """What was measured of one contender.

    Attributes:
      seconds: by round number, of one call. A contender that has used its budget misses rounds.
      skipped: why nothing was measured, or "".
      output: what ``look`` made of the outputs of the first run.
      program: what ran; None if skipped.
    """

    seconds: dict[int, float]
    skipped: str = ""
    output: Any = None
    program: Program | None = None


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    budget: float,
    label: str = "",
    seed: int = 0,
    look: Callable[[Any], Any] = lambda output: None,
) -> dict[str, Result]:
    """Times every contender once a round, in an order shuffled anew for each round.

    Args:
      contenders: each is made and run twice before the first round, once if that takes the budget.
      rounds: how many.
      budget: seconds after which a contender misses the remaining rounds, though it runs thrice
        unless a single run takes as long.
      label: shown with the progress.
      seed: of the orders.
      look: sees the outputs of the first run of each contender.

    Returns:
      Results by name, in the order of the contenders.
    """
    results = {}
    for contender in tqdm(contenders, f"{label} warm-up", leave=False):
        try:
            program = contender.make()
            start = time.perf_counter()
            first = program.run()
            seconds = time.perf_counter() - start
            output = look(first)
            del first
            if seconds < budget:
                program.run()
        except Exception as error:  # one contender must not end the measurement of the others
            results[contender.name] = Result({}, skipped=_reason(error))
        else:
            results[contender.name] = Result({}, output=output, program=program)
    running = [name for name, result in results.items() if result.program]
    order = np.random.default_rng(seed)
    for number in tqdm(range(rounds), f"{label} rounds", leave=False):
        gc.collect()  # at a time of our choice
        for name in order.permutation(running):
            seconds, program = results[name].seconds, results[name].program
            used = program.calls * sum(seconds.values())
            longest = program.calls * max(seconds.values(), default=0)
            again = len(seconds) < _FEWEST_RUNS and longest < budget
            if not seconds or used < budget or again:
                seconds[number] = _time(program)
    return results


def _time(program):
    time.sleep(_SETTLE_SECONDS)
    start = time.perf_counter()
    output = program.run()
    seconds = time.perf_counter() - start
    del output  # not earlier: freeing gigabytes is no part of the work
    return seconds / program.calls


def _reason(error):
    text = " ".join(str(error).split()) or "no message"
    kind = "" if isinstance(error, NotMeasured) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:160]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    q1, median, q3 = np.percentile(np.asarray(list(values)), [25, 50, 75])
    return float(q1), float(median), float(q3)


def ratios(result: Result, baseline: Result) -> list[float]:
    """Time over the baseline's time of the same round, for the rounds that both took part in."""
    common = result.seconds.keys() & baseline.seconds.keys()
    return [result.seconds[n] / baseline.seconds[n] for n in sorted(common)]
