import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from moe_jax.checkpoints import Checkpoints, best_step, saved_steps
from moe_jax.data import pipeline
from moe_jax.train import build, feed, loop
from moe_jax.train.__main__ import main
from moe_jax.train.log import RunLog

# Runs the command and sends itself a signal once the training row of a step is written.
SIGNALLED = """
import os, sys
from moe_jax.train import __main__, log
step_of_signal, number = int(sys.argv[1]), int(sys.argv[2])
write = log.RunLog.write_scalars

def write_and_signal(self, step, split, scalars):
    write(self, step, split, scalars)
    if (step, split) == (step_of_signal, "train"):
        os.kill(os.getpid(), number)

log.RunLog.write_scalars = write_and_signal
sys.exit(__main__.main(sys.argv[3:]))
"""


def test_files_of_a_finished_run(reference, rows_of):
    steps = [(row["step"], row["split"]) for row in rows_of(reference)]
    trained = [(step, "train") for step in (2, 4, 6, 8, 10)]
    assert sorted(steps) == sorted(trained + [(step, "validation") for step in (4, 8, 10)])
    assert saved_steps(reference / "checkpoints") == [9, 10]  # keep_last is 2
    assert best_step(reference / "checkpoints") == 10  # of 9 and 10 the one with a validation
    first = rows_of(reference)[0]
    assert first["loss"] > first["cross_entropy"] > 0
    assert 0 < first["load_cv_mean"] <= first["load_cv_max"]
    with np.load(reference / "routing.npz") as arrays:
        np.testing.assert_array_equal(arrays["step"], [2, 4, 6, 8, 10])
        assert arrays["load"].shape == (5, 1, 4)
        assert (arrays["load"].sum(axis=(1, 2)) == 4 * 16 * 2).all()  # B * S * k
        # A capacity of exactly the fair share drops as soon as the load is not uniform.
        assert 0 < arrays["dropped"].sum() < arrays["load"].sum()
    assert list((reference / "tensorboard").iterdir())
    assert json.loads((reference / "config.json").read_text())["steps"] == 10
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["step"] == 10 and summary["restarts"] == 0
    parts = summary["seconds"]
    assert min(parts[name] for name in ("training", "compiling", "validation", "saving")) > 0


def test_a_killed_run_goes_on_bit_for_bit(reference, command, tmp_path, rows_of, assert_same_run):
    line = command(tmp_path)
    step = random.Random(0).choice([4, 6, 8])  # steps with a row; checkpoints are at 3, 6, 9
    killed = [sys.executable, "-c", SIGNALLED, str(step), str(int(signal.SIGKILL))]
    process = subprocess.run([*killed, *line], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert max(saved_steps(tmp_path / "checkpoints"), default=0) <= step
    assert rows_of(tmp_path)[-1]["step"] == step
    assert main(line) == 0
    assert_same_run(tmp_path, reference, step=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_and_saves(
    reference, command, tmp_path, number, monkeypatch, capfd, assert_same_run
):
    write = RunLog.write_scalars

    def write_and_signal(self, step, split, scalars):
        write(self, step, split, scalars)
        if (step, split) == (4, "train"):
            os.kill(os.getpid(), number)

    line = command(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write_scalars", write_and_signal)
        assert main(line) == 128 + number
    assert saved_steps(tmp_path / "checkpoints") == [3, 4]
    captured = capfd.readouterr()
    assert "stopping after this step and saving" in captured.err
    assert f"python -m moe_jax.train {' '.join(line)}" in captured.out
    assert main(line) == 0
    assert "going on from step 4" in capfd.readouterr().out
    assert_same_run(tmp_path, reference, step=10)


def test_a_finished_run_is_left_alone(reference, command, capsys):
    before = {path: path.stat().st_mtime_ns for path in (reference / "checkpoints").rglob("*")}
    rows = (reference / "metrics.jsonl").read_bytes()
    assert main(command(reference)) == 0
    assert "finished (10 steps), nothing to do" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in (reference / "checkpoints").rglob("*")}
    assert after == before and (reference / "metrics.jsonl").read_bytes() == rows


def test_a_loss_that_is_not_finite_stops_the_run(command, tmp_path, capsys, rows_of):
    overrides = [
        "--config.optimizer.learning_rate=1e30",
        "--config.optimizer.warmup_steps=0",
        "--config.checkpoint_every_steps=1",
        "--config.log_every_steps=10",
        "--config.evaluate_every_steps=10",
    ]
    assert main(command(tmp_path, *overrides, kind="dense")) == 1
    error = capsys.readouterr().err
    # The first step starts from finite parameters and moves them by 1e30.
    assert re.match("error: step 2: the (loss|gradient norm) is nan, training stopped; ", error)
    assert error.endswith(f"the last good checkpoint is {tmp_path / 'checkpoints' / '1'}\n")
    assert error.count("\n") == 1
    assert saved_steps(tmp_path / "checkpoints") == [1]
    assert rows_of(tmp_path) == []


def test_a_loss_that_is_not_finite_is_found_without_logging(command, tmp_path, capsys):
    overrides = [
        "--config.optimizer.learning_rate=1e30",
        "--config.optimizer.warmup_steps=0",
        "--config.checkpoint_every_steps=10",
        "--config.log_every_steps=10",
        "--config.evaluate_every_steps=10",
    ]
    assert main(command(tmp_path, *overrides, kind="dense")) == 1
    error = capsys.readouterr().err
    assert re.match("error: step 2: the (loss|gradient norm) is nan", error)
    assert "there is no good checkpoint" in error
    assert saved_steps(tmp_path / "checkpoints") == []


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_state_that_is_not_finite_is_not_saved(command, tmp_path, capsys):
    overrides = [
        "--config.optimizer.learning_rate=1e39",  # infinite in float32
        "--config.optimizer.warmup_steps=0",
        "--config.checkpoint_every_steps=1",
        "--config.log_every_steps=1",
    ]
    assert main(command(tmp_path, *overrides, kind="dense")) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: the state after step 1 has NaN or infinite numbers; there is no"
    )
    assert saved_steps(tmp_path / "checkpoints") == []


@pytest.fixture
def bad_batches(monkeypatch):
    """(numbers) -> those batches have a token that the vocabulary has not, counted from 1."""

    def spoil(*numbers):
        train_batches = pipeline.train_batches

        def spoilt(*args, start=0, **kwargs):
            for number, batch in enumerate(train_batches(*args, start=start, **kwargs), start + 1):
                if number in numbers:
                    batch["tokens"][0, 3] = 60000
                yield batch

        monkeypatch.setattr(pipeline, "train_batches", spoilt)

    return spoil


SKIP = ("--config.on_nonfinite=skip", "--config.max_skipped_in_a_row=3")


def test_steps_that_are_not_finite_are_skipped_and_counted(
    bad_batches, command, tmp_path, capfd, rows_of, assert_same_run, monkeypatch
):
    bad_batches(3, 7, 8)
    line = command(tmp_path / "whole", *SKIP)
    assert main(line) == 0
    out = capfd.readouterr().out
    for said in ("step 3: the loss is nan, its update is skipped (1 so far)", "step 8: the loss"):
        assert out.count(said) == 1
    rows = [row for row in rows_of(tmp_path / "whole") if row["split"] == "train"]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 3, 3]  # of steps 2, 4, 6, 8, 10
    assert [row["loss"] is None for row in rows] == [False, False, False, True, False]

    # The counts go on where they were: here with a checkpoint between the two in a row.
    save = Checkpoints.save

    def save_and_signal(self, step, *args, **kwargs):
        save(self, step, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    line = command(tmp_path / "parts", *SKIP, "--config.checkpoint_every_steps=7")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_signal)
        assert main(line) == 128 + signal.SIGTERM
    assert saved_steps(tmp_path / "parts" / "checkpoints") == [7]
    assert main(line) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole", step=10)


def test_too_many_skipped_steps_in_a_row_end_the_run(bad_batches, command, tmp_path, capsys):
    bad_batches(2, 4, 5, 6)
    assert main(command(tmp_path, *SKIP, "--config.checkpoint_every_steps=5")) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: step 6: the loss is nan, training stopped; the last good")
    assert error.endswith(f" checkpoint is {tmp_path / 'checkpoints' / '5'}\n")
    assert saved_steps(tmp_path / "checkpoints") == [5]


@pytest.fixture
def hanging_batches(monkeypatch):
    """The batches after the fifth do not come; the test may set what is given to it."""
    train_batches, came = pipeline.train_batches, threading.Event()

    def hang(*args, start=0, **kwargs):
        for number, batch in enumerate(train_batches(*args, start=start, **kwargs), start + 1):
            if number == 6:
                came.wait()
            yield batch

    monkeypatch.setattr(pipeline, "train_batches", hang)
    yield came
    came.set()


def test_data_that_does_not_come_ends_the_run(hanging_batches, command, tmp_path, capsys):
    line = command(tmp_path, "--config.data.timeout_seconds=3", kind="dense")
    assert main(line) == os.EX_TEMPFAIL == 75
    assert capsys.readouterr().err == (
        "error: step 6: no batch of data.dataset sotu in 3 s (data.timeout_seconds), training"
        f" stopped; the last good checkpoint is {tmp_path / 'checkpoints' / '3'}\n"
    )
    assert saved_steps(tmp_path / "checkpoints") == [3]


def test_a_signal_while_waiting_for_data_stops_and_saves(
    reference, hanging_batches, command, tmp_path, capfd, monkeypatch, assert_same_run
):
    monkeypatch.setattr(feed, "_SAY_EVERY_SECONDS", 0.2)

    def say_and_signal(self, text):
        if text.startswith("waiting for data since"):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Progress, "say", say_and_signal)
        assert main(command(tmp_path)) == 128 + signal.SIGTERM
    assert saved_steps(tmp_path / "checkpoints") == [3, 5]
    hanging_batches.set()
    # What is of a machine may change.
    assert main(command(tmp_path, "--config.data.timeout_seconds=0")) == 0
    assert_same_run(tmp_path, reference, step=10)


def test_data_cut_behind_a_run_is_named(command, session_dir, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    shutil.copytree(session_dir / "cache", cache)
    [tokens] = (cache / "tokens").glob("sotu-*-train-byte.npy")
    write = RunLog.write_scalars

    def write_and_cut(self, step, split, scalars):
        write(self, step, split, scalars)
        os.truncate(tokens, 5000)

    monkeypatch.setattr(RunLog, "write_scalars", write_and_cut)
    long = ["--config.steps=60", "--config.evaluate_every_steps=60"]  # nine batches are read ahead
    line = command(tmp_path / "run", *long, f"--config.data.cache_dir={cache}", kind="dense")
    assert main(line) == os.EX_TEMPFAIL
    error = capsys.readouterr().err
    assert re.fullmatch(
        rf"error: step \d+: data.dataset sotu cannot be read: {tokens} has 5000 of \d+ bytes,"
        rf" training stopped; the last good checkpoint is {tmp_path}/run/checkpoints/\d+\n",
        error,
    ), error


def test_a_resumed_run_compiles_the_same_program(command, tmp_path, monkeypatch):
    programs = []
    make_train_step = build.make_train_step

    def make_and_record(*args, **kwargs):
        step = make_train_step(*args, **kwargs)

        def lower(*shapes):
            lowered = step.lower(*shapes)
            programs.append(lowered.as_text())
            return lowered

        return types.SimpleNamespace(lower=lower)

    monkeypatch.setattr(build, "make_train_step", make_and_record)
    short = ["--config.steps=4", "--config.optimizer.warmup_steps=1"]
    line = command(tmp_path, *short, kind="dense")
    assert main(line) == 0
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    assert main(line) == 0
    assert len(programs) == 2 and programs[0] == programs[1]


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    reference, command, tmp_path, capsys, assert_same_run
):
    workdir = tmp_path / "run"
    shutil.copytree(reference, workdir)
    checkpoints = workdir / "checkpoints"
    array = max((checkpoints / "10" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    array.write_bytes(array.read_bytes()[:-7])
    capsys.readouterr()
    assert main(command(workdir)) == 0  # though there is a checkpoint of the last step
    out = capsys.readouterr().out
    assert out.startswith(f"checkpoint {checkpoints / '10'} is damaged: params/")
    assert f" bytes; using {checkpoints / '9'} instead; it is kept as" in out.splitlines()[0]
    assert "going on from step 9" in out
    assert re.search(r"finished 10 steps in \d+ s: training \d+ %, .*compiling \d+ %", out)
    assert json.loads((workdir / "summary.json").read_text())["restarts"] == 1
    assert saved_steps(checkpoints) == [9, 10] and (checkpoints / "10.damaged").is_dir()
    assert_same_run(workdir, reference, step=10)
    assert main(command(workdir)) == 0
    assert "finished (10 steps), nothing to do" in capsys.readouterr().out


def test_without_a_good_checkpoint_nothing_is_trained(reference, command, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(reference, workdir)
    checkpoints = workdir / "checkpoints"
    for step in (9, 10):
        os.remove(checkpoints / str(step) / "files.json")
    rows = (workdir / "metrics.jsonl").read_bytes()
    assert main(command(workdir)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: every checkpoint in {checkpoints} is damaged (10: files.json")
    assert error.count("\n") == 1
    assert saved_steps(checkpoints) == [9, 10]
    assert (workdir / "metrics.jsonl").read_bytes() == rows


def test_another_config_is_refused(reference, command, capsys):
    assert main(command(reference, "--config.moe.k=1")) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --workdir: ") and "(moe.k: 2 -> 1)" in error
    assert error.count("\n") == 1


def test_variants_are_trained_one_after_the_other(command, tmp_path, capsys):
    short = ["--config.steps=4", "--config.optimizer.warmup_steps=1"]
    line = command(tmp_path, *short, kind="variants")
    assert main(line) == 0
    for name in ("first", "second"):
        assert saved_steps(tmp_path / name / "checkpoints") == [3, 4]
        assert (tmp_path / name / "metrics.csv").is_file()
        assert not (tmp_path / name / "routing.npz").exists()  # dense
    assert not (tmp_path / "checkpoints").exists()
    out = capsys.readouterr().out
    assert out.index("first: finished 4 steps") < out.index("second: compiling")
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    assert main(line) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'first'}: finished" in out and "second: finished 4 steps" in out


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(command, small_disk, rows_of):
    workdir = small_disk / "run"
    line = command(workdir, kind="dense")
    process = subprocess.run(
        [sys.executable, "-m", "moe_jax.train", *line], capture_output=True, text=True
    )
    assert process.returncode == 1
    # Whatever is written first on the full disk, a row or a checkpoint.
    assert re.fullmatch(
        rf"error: ({workdir}.*: No space left on device|checkpoint {workdir}/checkpoints/\d+ could"
        r" not be written: no space left on the device; .*)\n",
        process.stderr,
    ), process.stderr
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert main(line) == 0
    assert saved_steps(workdir / "checkpoints") == [9, 10]
    assert [row["step"] for row in rows_of(workdir)] == [2, 4, 4, 6, 8, 8, 10, 10]
