import os
import signal
import subprocess
import sys

import pytest

from moe_jax.checkpoints import saved_steps
from moe_jax.train import restarts
from moe_jax.train.__main__ import main
from moe_jax.train.restarts import run_with_restarts

pytestmark = pytest.mark.sweep

# Runs the command. In its first life the writer of a checkpoint is slow to finish, and the process
# is killed while it is at it.
KILLED_ONCE = """
import os, signal, sys, threading, time
from pathlib import Path
from moe_jax.checkpoints import manager
from moe_jax.train import __main__
workdir, step = Path(sys.argv[1]), sys.argv[2]
marker = workdir / "died"
write_manifest = manager.write_manifest

def write_slowly(unfinished):
    if unfinished.name.startswith(f"{step}."):
        threading.Timer(0.2, die, [unfinished]).start()
        time.sleep(60)
    write_manifest(unfinished)

def die(unfinished):
    marker.write_text(" ".join(os.listdir(unfinished.parent)))
    os.kill(os.getpid(), signal.SIGKILL)

if not marker.exists():
    manager.write_manifest = write_slowly
sys.exit(__main__.main(sys.argv[3:]))
"""

# Appends to a file what it does. Ends as its life's word says: a signal, an exit code, or "wait".
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
workdir, *lives = sys.argv[1:]
path = Path(workdir) / "lives"
life = path.read_text().count("start") if path.exists() else 0
path.open("a").write("start\\n")

def note(number, frame):
    path.open("a").write(f"{signal.Signals(number).name}\\n")
    os._exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
end, _, checkpoint = lives[life].partition(":")
if checkpoint:
    (Path(workdir) / "run" / "checkpoints" / checkpoint).mkdir(parents=True)
if end == "wait":
    print("waiting", flush=True)
    time.sleep(60)
elif end.isdigit():
    sys.exit(int(end))
os.kill(os.getpid(), getattr(signal, end))
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(restarts, "_LONGEST_PAUSE_SECONDS", 0.01)


def run_lives(workdir, *lives, max_restarts=2):
    command = [sys.executable, "-c", SCRIPT, str(workdir), *lives]
    code = run_with_restarts(command, workdir, max_restarts=max_restarts)
    return code, (workdir / "lives").read_text().count("start")


@pytest.mark.parametrize(
    "lives, code",
    [
        (["0"], 0),
        (["1", "0"], 1),  # a mistake
        (["143", "0"], 143),  # a signal that the process was sent by another hand
        (["SIGKILL", "75", "SIGSEGV", "0"], 128 + signal.SIGSEGV),  # too often
        (["SIGABRT", "SIGKILL:5", "75", "0"], 0),  # a checkpoint on the way
        (["75:5", "75", "75", "0"], 75),  # 75:5 is the first without one
    ],
)
def test_only_what_may_pass_is_tried_again(quick, tmp_path, lives, code):
    number = lives.index("0") + 1 if code == 0 else len(lives) - (len(lives) > 1)
    assert run_lives(tmp_path, *lives) == (code, number)


def test_pauses_double_and_are_told_of(tmp_path, monkeypatch, capfd):
    pauses = []
    monkeypatch.setattr(restarts._Child, "sleep", lambda self, seconds: pauses.append(seconds))
    monkeypatch.setattr(restarts._Child, "run", lambda self: -signal.SIGKILL)
    assert run_with_restarts(["none"], tmp_path, max_restarts=8) == 128 + signal.SIGKILL
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert capfd.readouterr().err.startswith(
        "the training died of SIGKILL; starting it again in 1 s (1 of 8 times without a new"
    )


@pytest.mark.parametrize(
    "life, number",
    [("wait", signal.SIGINT), ("wait", signal.SIGHUP), ("75", signal.SIGTERM)],
)
def test_a_signal_is_handed_on_and_is_the_end(tmp_path, life, number):
    parent = """
import sys
from pathlib import Path
from moe_jax.train import restarts
restarts.time.monotonic = lambda: 0.0  # pauses do not end
sys.exit(restarts.run_with_restarts(sys.argv[2:], Path(sys.argv[1]), max_restarts=1))
"""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), life]
    process = subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Until the child waits, or the parent does before it starts it again.
    (process.stdout if life == "wait" else process.stderr).readline()
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    noted = (tmp_path / "lives").read_text().split()
    assert noted == ["start", signal.Signals(number).name][: 2 if life == "wait" else 1]


def test_the_command_is_run_in_a_process_of_its_own(command, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        "moe_jax.train.__main__.run_with_restarts", lambda *args, **kwargs: given.append(args) or 9
    )
    line = command(tmp_path / "run")
    assert main([*line, "--max_restarts=2"]) == 9
    assert given == [([sys.executable, "-m", "moe_jax.train", *line], tmp_path / "run")]


def test_killed_inside_a_save_and_started_again_it_is_the_same_run(
    reference, command, tmp_path, quick, capfd, assert_same_run
):
    workdir = tmp_path / "run"
    workdir.mkdir()
    line = [sys.executable, "-c", KILLED_ONCE, str(workdir), "6", *command(workdir)]
    assert run_with_restarts(line, workdir, max_restarts=1) == 0
    left = (workdir / "died").read_text().split()
    assert "3" in left and "6" not in left  # begun and not committed
    assert any(name.startswith("6.orbax-checkpoint-tmp") for name in left)
    captured = capfd.readouterr()
    assert "died of SIGKILL" in captured.err and "going on from step 3" in captured.out
    assert saved_steps(workdir / "checkpoints") == [9, 10]
    assert sorted(os.listdir(workdir / "checkpoints")) == ["10", "9"]
    assert_same_run(workdir, reference, step=10)
