"""Real processes that meet on loopback, stop together and go on as others."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_jax.checkpoints import saved_steps
from moe_jax.train.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
# Runs the command; process number ``who`` sends itself a signal at the end of a step with metrics.
SIGNALLED = """
import os, sys
from moe_jax.train import __main__, loop
who, step_of_signal, number = (int(a) for a in sys.argv[1:4])
write = loop._Run._write_metrics

def write_and_signal(self, step, metrics):
    import jax
    write(self, step, metrics)
    if (step, jax.process_index()) == (step_of_signal, who):
        os.kill(os.getpid(), number)

loop._Run._write_metrics = write_and_signal
__main__.leave(__main__.main(sys.argv[4:]))
"""
OVERRIDES = (
    "--config.data.batch_size=8",
    "--config.log_every_steps=1",
    "--config.keep_last=20",
    "--config.moe.implementation=dropless",
    "--config.moe.backend=reference",
    "--config.model.num_layers=2",
)


def free_port():
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def slurm_variables(index, count, port):
    """What SLURM tells process number ``index`` of a step on this machine."""
    return {
        "SLURM_JOB_ID": str(port % 2**12),  # jax makes the port of it
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def run_processes(count, arguments, *, who=-1, step=0, number=0, num_devices=8, slurm=False):
    """Exit codes and outputs (stdout, stderr) of ``count`` processes that share the devices."""
    port = free_port()
    share = num_devices // count
    flags = f"--xla_force_host_platform_device_count={share}"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    processes = []
    for index in range(count):
        line = [sys.executable, "-c", SIGNALLED, str(who), str(step), str(number), *arguments]
        variables = slurm_variables(index, count, port) if slurm else {}
        if slurm:
            line += ["--distributed"]
        elif count > 1:
            line += ["--coordinator", f"localhost:{port}", "--num_processes", str(count)]
            line += ["--process_index", str(index)]
        processes.append(
            subprocess.Popen(
                line,
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=300)[0])
    finally:
        for process in processes:
            process.kill()
    return [p.returncode for p in processes], outputs


def assert_close_rows(rows, expected):
    assert [(r["step"], r["split"]) for r in rows] == [(r["step"], r["split"]) for r in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            if name != "split":
                np.testing.assert_allclose(row[name], other[name], rtol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def undisturbed(session_dir, command):
    """The run of one process with one device."""
    workdir = session_dir / "undisturbed"
    assert main(command(workdir, *OVERRIDES)) == 0
    return workdir


@pytest.mark.sweep
def test_a_run_wanders_over_processes_and_meshes(
    undisturbed, command, tmp_path, rows_of, arrays_of
):
    """Four processes with eight devices, then one with one: one run in the end."""
    line = command(tmp_path, *OVERRIDES)
    four = ["--config.mesh.data=2", "--config.mesh.expert=4"]
    codes, outputs = run_processes(4, [*line, *four], who=2, step=3, number=signal.SIGTERM.value)
    assert codes == [128 + signal.SIGTERM] * 4, "\n".join(outputs)
    assert (
        "mesh: data 2 x fsdp 1 x expert 4 x tensor 1 = 8 devices (cpu, 4 processes)" in outputs[0]
    )
    assert "SIGTERM: stopping" in outputs[2] and "compiling" not in outputs[2]
    [stopped] = set(saved_steps(tmp_path / "checkpoints")) - {3}
    assert stopped in (4, 5)  # the others hear of it a step later

    assert main(line) == 0
    assert_close_rows(rows_of(tmp_path), rows_of(undisturbed))
    got, expected = arrays_of(tmp_path, 10), arrays_of(undisturbed, 10)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        largest = max(np.max(np.abs(array)), 1e-6)
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-4 * largest, err_msg=name)


def test_who_is_left_alone_says_so(command, tmp_path, rows_of, undisturbed):
    """Of two processes, as SLURM starts them, one is killed: the other ends, a new run goes on."""
    line = command(tmp_path, *OVERRIDES)
    two = ["--config.mesh.data=2"]
    codes, outputs = run_processes(
        2, [*line, *two], who=1, step=5, number=signal.SIGKILL.value, num_devices=2, slurm=True
    )
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == 75, outputs[0]
    assert "error: another process of this run is gone" in outputs[0]
    assert "Traceback" not in outputs[0]
    assert 3 in saved_steps(tmp_path / "checkpoints")
    assert main(line) == 0
    assert_close_rows(rows_of(tmp_path), rows_of(undisturbed))
