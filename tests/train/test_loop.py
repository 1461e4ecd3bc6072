import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from moe_jax.checkpoints import best_step, saved_steps
from moe_jax.train import build
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


@pytest.fixture(scope="module")
def reference(session_dir, command):
    """The directory of an uninterrupted run of ten steps."""
    workdir = session_dir / "reference"
    assert main(command(workdir)) == 0
    return workdir


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


def test_a_damaged_checkpoint_stops_the_run_and_removes_nothing(
    reference, command, tmp_path, capsys
):
    workdir = tmp_path / "run"
    shutil.copytree(reference, workdir)
    checkpoints = workdir / "checkpoints"
    shutil.move(checkpoints / "10", tmp_path / "10")  # as if the run had ended after 9
    shutil.copytree(checkpoints / "9", checkpoints / "8")
    rows = (workdir / "metrics.jsonl").read_bytes()
    array = max((checkpoints / "9" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    array.write_bytes(array.read_bytes()[:-7])
    capsys.readouterr()
    assert main(command(workdir)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: checkpoint {checkpoints / '9'} is damaged: params/")
    assert f"the last good checkpoint is {checkpoints / '8'}; move the damaged one away" in error
    assert error.count("\n") == 1
    assert saved_steps(checkpoints) == [8, 9]
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
