"""One training run from its config to its last step, going on from its last checkpoint."""

import concurrent.futures
import contextlib
import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from moe_jax.checkpoints import CheckpointError, Checkpoints, saved_steps, set_aside_damaged
from moe_jax.checkpoints.partial import parse_rules, take_parameters
from moe_jax.train.build import (
    explain_backend,
    make_initial_state,
    make_model,
    make_run_mesh,
    make_train_step_of,
)
from moe_jax.train.evaluation import bytes_per_token, evaluate_split
from moe_jax.train.feed import DataError, Feed
from moe_jax.train.goodput import Goodput, describe
from moe_jax.train.log import NoLog, RunLog
from moe_jax.train.metrics import Metrics, train_scalars
from moe_jax.train.placement import Placement
from moe_jax.train.processes import SharedStop, is_first, wait_for_all
from moe_jax.train.progress import Progress
from moe_jax.train.signals import StopRequest
from moe_jax.train.state import TrainState
from moe_jax.train.trace import StepTrace

_STILL_COMPILING_SECONDS = 30.0


class TrainingError(RuntimeError):
    """A run that cannot go on; the message is one line."""


class Data(NamedTuple):
    """What a run reads.

    Attributes:
      tokenizer: a ``moe_jax.data.tokenizers.Tokenizer``.
      train, validation: ``TextSplit``.
    """

    tokenizer: Any
    train: Any
    validation: Any


def train(
    config: ConfigDict,
    directory: Path,
    *,
    stop: StopRequest,
    name: str = "",
    profile: bool = False,
) -> None:
    """Trains until the last step or until ``stop``; then the run's files and checkpoint are whole.

    A run that has checkpoints goes on from the last good one and gives the very numbers of a run
    that was never interrupted; a finished run is left alone.

    Args:
      config: of a single run, validated.
      directory: of the run; must exist.
      stop: looked at after every step. A validation at hand is finished first.
      name: of the run, for messages.
      profile: some steps are traced, into the folder "profile" of the run.

    Raises:
      TrainingError: the loss became NaN or infinite, more often than it may, or the data cannot be
        used.
      DataError: a batch did not come in time, or could not be read.
      CheckpointError: every checkpoint is damaged, or one cannot be written.
    """
    checkpoints_directory = directory / "checkpoints"
    if is_first():
        set_aside_damaged(checkpoints_directory, functools.partial(print, flush=True))
    wait_for_all("the checkpoints")
    done = max(saved_steps(checkpoints_directory), default=0)
    if done >= config.steps:
        if is_first():
            print(f"{directory}: finished ({done} steps), nothing to do", flush=True)
        return
    goodput = Goodput(directory, writes=is_first())
    goodput.write(done)
    placement = Placement(make_run_mesh(config))
    progress = Progress(steps=config.steps, name=name, silent=not is_first())
    with progress, placement.active():
        progress.say("preparing the data and the model")
        data, batches = _load_data(config, done, placement)
        model = make_model(config, data.tokenizer.vocab_size, placement.mesh)
        if placement.mesh is not None:
            progress.say(_describe(placement.mesh))
        if config.moe.num_experts:
            progress.say(explain_backend(config))
        with Checkpoints(
            checkpoints_directory, keep_last=config.keep_last, keep_best=config.keep_best
        ) as checkpoints:
            if done:
                state = _restore(config, model, checkpoints, done, placement)
                progress.say(f"going on from step {done}")
            else:
                state = _first_state(config, model, placement)
                if config.init.checkpoint:
                    rules = parse_rules(config.init.rules)
                    params, line = take_parameters(state.params, config.init.checkpoint, rules)
                    state = state._replace(params=params)
                    progress.say(f"init: {line}")
            feed = Feed(
                batches,
                source=f"data.dataset {config.data.dataset}",
                timeout_seconds=config.data.timeout_seconds,
                say=progress.say,
            )
            log = RunLog(directory, step=done) if is_first() else NoLog(directory)
            trace = StepTrace(directory / "profile" if profile and is_first() else None)
            with contextlib.closing(feed), contextlib.closing(trace), log:
                run = _Run(
                    config, model, data, checkpoints, log, progress, placement, feed, goodput
                )
                run.train(state, stop, trace)


class _Run:
    """The parts of a run that its steps need."""

    def __init__(self, config, model, data, checkpoints, log, progress, placement, feed, goodput):
        self._config = config
        self._placement = placement
        self._model = model
        self._data = data
        self._token_bytes = bytes_per_token(data.tokenizer)
        self._checkpoints = checkpoints
        self._log = log
        self._progress = progress
        self._feed = feed
        self._goodput = goodput
        self._timer = None  # (step, time) from which the throughput is measured
        self._idle_before = 0.0  # idle_seconds of the feed then

    def train(self, state: TrainState, stop: StopRequest, trace: StepTrace) -> None:
        config = self._config
        step = saved = int(state.step)
        with self._goodput.spent("compiling"):
            train_step = self._compile(state)
        self._goodput.prepared()
        self._progress.start(step)
        self._timer = (step, time.perf_counter())
        self._skipped = 0 if state.skipped is None else int(state.skipped.total)
        previous = None
        stopping = SharedStop(stop, self._placement.mesh)
        rows = self._placement.rows(config.data.batch_size)
        while step < config.steps and not stopping():
            batch = self._next_batch(step + 1, previous, stop)
            if batch is None:
                break
            with trace.watch(step + 1):
                batch = self._placement.put(batch, rows, config.data.batch_size)
                state, metrics = train_step(state, batch)
            step += 1
            if trace.is_complete():
                jax.block_until_ready(metrics)
                self._progress.say(trace.close())
            # One step behind, so that the device is never without work.
            if previous is not None:
                self._require_finite(step - 1, previous)
                self._progress.advance(step - 1)
            previous = metrics
            last = step == config.steps
            cross_entropy = None
            if step % config.log_every_steps == 0 or last:
                self._write_metrics(step, metrics)
            if step % config.evaluate_every_steps == 0 or last:
                self._require_finite(step, metrics)
                cross_entropy = self._evaluate(step, state)
            if step % config.checkpoint_every_steps == 0 or last:
                self._save(step, state, metrics, cross_entropy)
                saved = step
        if step > saved:
            self._save(step, state, metrics)
        with self._goodput.spent("saving"):
            self._checkpoints.wait()
        seconds = self._goodput.write(step, self._feed.idle_seconds)
        if step == config.steps:
            self._progress.say(
                f"finished {step} steps in {describe(seconds)}; results in {self._log.directory}"
            )

    def _compile(self, state):
        """The training step, compiled once for the only shape there is."""
        config = self._config
        step = make_train_step_of(config, self._model, self._placement.shardings(state))
        # From shapes alone: a restored array is bound to its device and a new one is not, which
        # would make another program, with other rounding, of the same step.
        state = self._placement.shapes(state)
        shape = (config.data.batch_size, config.data.sequence_length + 1)
        batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}
        batch = self._placement.batch_shapes(batch)
        self._progress.say("compiling the training step")
        began = time.perf_counter()
        # In a thread, since Python handles signals between instructions of its main thread only.
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            future = executor.submit(self._lower_and_compile, step, state, batch)
            while not future.done():
                concurrent.futures.wait([future], timeout=_STILL_COMPILING_SECONDS)
                if not future.done():
                    self._progress.say("still compiling")
        self._progress.say(f"compiled in {time.perf_counter() - began:.1f} s")
        return future.result()

    def _lower_and_compile(self, step, *shapes):
        with self._placement.active():  # a thread starts without
            options = self._placement.compiler_options()
            return step.lower(*shapes).compile(compiler_options=options)

    def _next_batch(self, step, previous, stop):
        """The batch for ``step``; None if the run is to stop instead."""

        def busy():
            return previous is not None and not previous.loss.is_ready()

        def stopped():
            # Several processes stop together, after a step.
            return stop.signal is not None and jax.process_count() == 1

        try:
            return self._feed.next(stopped=stopped, busy=busy, step=step)
        except DataError as error:
            good = self._checkpoints.last_good(before=step)
            raise DataError(f"{error}, training stopped; {good}") from error

    def _write_metrics(self, step, metrics):
        self._require_finite(step, metrics)
        metrics = jax.device_get(metrics)
        first, began = self._timer
        num_tokens = (step - first) * self._config.data.batch_size
        num_tokens *= self._config.data.sequence_length
        seconds = time.perf_counter() - began
        tokens_per_second = num_tokens / seconds
        scalars = train_scalars(metrics) | {
            "tokens_per_second": tokens_per_second,
            "data_wait_fraction": (self._feed.idle_seconds - self._idle_before) / seconds,
        }
        self._idle_before = self._feed.idle_seconds
        self._log.write_scalars(step, "train", scalars)
        if metrics.routing is not None:
            self._log.write_routing(step, metrics.routing.load, metrics.routing.dropped)
        self._progress.update(step, float(metrics.loss), tokens_per_second)
        self._timer = (step, time.perf_counter())

    def _evaluate(self, step, state):
        """Validates, and returns the cross-entropy in nats per token."""
        config = self._config
        with self._untimed("validation"):
            result = evaluate_split(
                self._model,
                state.variables,
                self._data.validation,
                sequence_length=config.data.sequence_length,
                batch_size=config.data.batch_size,
                token_bytes=self._token_bytes,
                max_batches=config.evaluate_batches,
                put=self._placement.put_whole,
            )
        if not math.isfinite(result.nll):
            raise TrainingError(self._stopped(step, "validation loss", result.cross_entropy))
        scalars = result.scalars()
        self._log.write_scalars(step, "validation", scalars)
        self._progress.say(
            f"step {step}: validation cross-entropy {scalars['cross_entropy']:.4f},"
            f" {scalars['bits_per_byte']:.4f} bits per byte"
        )
        return scalars["cross_entropy"]

    def _save(self, step, state, metrics, cross_entropy=None):
        self._require_finite(step, metrics)
        with self._untimed("saving"):
            self._log.flush()
            try:
                self._checkpoints.save(step, _trees(state), cross_entropy=cross_entropy)
            except FloatingPointError as error:
                good = self._checkpoints.last_good(before=step)
                raise TrainingError(f"{error}; {good}") from None
        self._goodput.write(step, self._feed.idle_seconds)

    def _require_finite(self, step, metrics: Metrics):
        """Waits for the step and checks its numbers; some that were skipped may pass."""
        for name, value in (("loss", metrics.loss), ("gradient norm", metrics.gradient_norm)):
            if math.isfinite(value):
                continue
            if not self._may_skip(metrics.skipped):
                raise TrainingError(self._stopped(step, name, float(value)))
            if metrics.skipped.total > self._skipped:
                self._skipped = int(metrics.skipped.total)
                self._progress.say(
                    f"step {step}: the {name} is {float(value)}, its update is skipped"
                    f" ({self._skipped} so far)"
                )

    def _may_skip(self, skipped):
        return skipped is not None and skipped.in_a_row < self._config.max_skipped_in_a_row

    def _stopped(self, step, name, value):
        good = self._checkpoints.last_good(before=step)
        return f"step {step}: the {name} is {value}, training stopped; {good}"

    @contextlib.contextmanager
    def _untimed(self, part):
        """Leaves what is done within out of the throughput; it counts for ``part`` of the time."""
        began = time.perf_counter()
        with self._goodput.spent(part):
            yield
        step, timer = self._timer
        self._timer = (step, timer + time.perf_counter() - began)


def _describe(mesh):
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    processes = jax.process_count()
    where = f", {processes} processes" if processes > 1 else ""
    return f"mesh: {sizes} = {mesh.size} devices ({kind}{where})"


def _load_data(config, step, placement):
    """The Data and an iterator over this process's part of the batches after ``step``."""
    from moe_jax.data.pipeline import load_split, train_batches
    from moe_jax.data.tokenizers import load_tokenizer

    data = config.data
    if not is_first():
        wait_for_all("the data")  # prepared by one
    vocab_size = None if data.tokenizer == "byte" else data.vocab_size
    try:
        tokenizer = load_tokenizer(data.tokenizer, data.dataset, vocab_size, data.cache_dir)
        splits = [
            load_split(data.dataset, split, tokenizer, data.cache_dir)
            for split in ("train", "validation")
        ]
        batches = train_batches(
            splits[0],
            sequence_length=data.sequence_length,
            batch_size=data.batch_size,
            seed=config.seed,
            start=step,  # every step takes one batch
            rows=placement.rows(data.batch_size),
        )
    except (ValueError, OSError) as error:
        raise TrainingError(f"data: {' '.join(str(error).split())}") from error
    if is_first():
        wait_for_all("the data")
    return Data(tokenizer, *splits), batches


def _first_state(config, model, placement):
    def make():
        return make_initial_state(config, model)

    return jax.jit(make, out_shardings=placement.shardings(jax.eval_shape(make)))()


def _restore(config, model, checkpoints, step, placement):
    shapes = placement.shapes(jax.eval_shape(lambda: make_initial_state(config, model)))
    trees = checkpoints.restore(step, _trees(shapes))
    inside = int(trees["training"]["step"])
    if inside != step:
        raise CheckpointError(f"the checkpoint named {step} is of step {inside}: rename it back")
    return TrainState(
        params=trees["params"], router_state=trees.get("router_state", {}), **trees["training"]
    )


def _trees(state):
    """The named trees of a checkpoint; by themselves those that evaluation needs."""
    training = {"step": state.step, "opt_state": state.opt_state, "key": state.key}
    if state.skipped is not None:
        training["skipped"] = state.skipped
    trees = {"params": state.params, "training": training}
    return trees | ({"router_state": state.router_state} if state.router_state else {})
