"""The command, on CPU devices in place of a topology, and with the compilers where they are."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from moe_jax import compile as command
from moe_jax.compiling import train_step
from moe_jax.compiling.chips import CHIPS
from moe_jax.compiling.topology import Topology
from moe_jax.config import resolve_runs

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs" / "demo.py")
SMALL = [
    "--config.data.sequence_length=8",
    "--config.data.batch_size=8",
    "--config.data.tokenizer=byte",
    "--config.model.width=32",
    "--config.model.num_layers=2",
    "--config.model.num_heads=2",
    "--config.model.mlp_width=64",
]


@pytest.fixture
def run(monkeypatch, capsys, quick_compilation):
    """(*arguments) -> exit code, stdout, stderr; every topology is eight CPU devices."""

    def run_command(*arguments, chip=CHIPS["v5e"]):
        topology = Topology("v5e:2x4", chip, 8, "cpu", {})
        monkeypatch.setattr(command, "parse_topology", lambda name: topology)
        monkeypatch.setattr(train_step, "devices_of", lambda topology: jax.devices())
        code = command.main(["--config", f"{DEMO}:dense", "--topology=v5e:2x4", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def test_reports_a_dense_step(run, tmp_path):
    path = tmp_path / "new" / "report.json"
    mesh = ["--config.mesh.fsdp=2", "--config.model.remat=true"]
    code, out, err = run(*SMALL, *mesh, "--json", str(path), "--hlo", str(tmp_path / "hlo.txt"))
    assert code == 0 and "compiling it for 8 devices" in err
    assert "mesh data 4 x fsdp 2 x expert 1 x tensor 1" in out and "): fits" in out
    assert (tmp_path / "hlo.txt").read_text().startswith("HloModule jit_step")
    report = json.loads(path.read_text())
    assert report["config"] == f"{DEMO}:dense"
    # Head and embedding are one matrix of 257 x 32. By layer: 4 of 32 x 32, 2 of 32 x 64, 2 norms.
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert report["parameters"]["total"] == 257 * 32 + matrices + 5 * 32
    # Three times the forward pass of 64 tokens, with 2 products of 8 x 32 for scores by layer.
    forward = 2 * (257 * 32 + matrices) + 2 * 2 * 2 * 8 * 32
    assert report["flops"]["model_step"] == 3 * 64 * forward
    memory = report["memory"]
    assert memory["parameters"] == 4 * ((257 * 32 + matrices) // 2 + 5 * 32)
    assert memory["total"] >= memory["arguments"] + memory["temporaries"]
    assert {row["axes"] for row in report["traffic"]} >= {"fsdp"}
    estimate = report["estimate"]
    # The forward pass comes twice.
    assert estimate["compute"] == pytest.approx(3 * 64 * forward * 4 / 3 / 8 / 197e12)
    assert estimate["serial"] == pytest.approx(
        estimate["compute"] + estimate["hbm"] + estimate["network"]
    )
    ideal = 3 * 64 * forward / (8 * 197e12)
    assert estimate["mfu_serial"] == pytest.approx(ideal / estimate["serial"])


def test_too_little_memory_is_said_with_what_helps(run):
    tiny = CHIPS["v5e"]._replace(hbm_bytes=1000.0)
    code, out, err = run(*SMALL, chip=tiny)
    assert code == 1 and "does not fit" in out
    assert "error: the step does not fit the memory of TPU v5e; what helps: --config.model" in err
    assert "--config.mesh.fsdp of more than 1, up to 8" in err


def test_what_the_compiler_says_of_memory_is_said(run, monkeypatch):
    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
            " hbm. Used 20.60G of 15.75G hbm. Exceeded hbm capacity by 4.85G."
        )

    monkeypatch.setattr(command, "compile_train_step", refuse)
    code, out, err = run(*SMALL)
    assert code == 1 and "the compiler: Used 20.60G of 15.75G hbm" in out
    assert "error: the step does not fit" in err and "up to 8" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config", f"{DEMO}:moe", "--topology", "v9:2x2"], "--topology: got 'v9:2x2'; allowed:"),
        (["--config", f"{DEMO}:moe"], "--topology: missing; allowed: v5p:AxBxC"),
        (["--topology", "v5e:2x4"], "--config: missing"),
        (["--config", DEMO, "--topology", "v5e:2x4"], "got the variants dense, moe; allowed: one"),
        (["--config", f"{DEMO}:moe", "--topology", "h100x8", "--workdir", "x"], "workdir"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, arguments, message):
    assert command.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_every_config_is_valid(name):
    config, _ = command.parse_command_line(
        ["--config", str(ROOT / "configs" / f"{name}.py")], usage="", with_workdir=False
    )
    assert resolve_runs(config)


def test_numbers_have_three_digits():
    texts = [command._scaled(n) for n in (0, 7, 999, 999.6, 12_345, 95 * 2**30, 1.5e15)]
    assert texts == ["0 B", "7 B", "999 B", "1.00 kB", "12.3 kB", "102 GB", "1.50 PB"]


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, backend",
    [
        ("v5e:2x4", r"(tokamax|pallas_tpu) on TPU v5 lite"),
        ("h100x8", r"(tokamax|mosaic_gpu) on NVIDIA H100"),
        ("b200x8", r"\w+ on NVIDIA B200"),  # for which tokamax has no gradient
    ],
)
def test_compiles_for_accelerators(topology, backend, tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compilers for accelerators are not installed")
    path = tmp_path / "report.json"
    line = [sys.executable, "-m", "moe_jax.compile", "--config", f"{DEMO}:moe"]
    line += ["--topology", topology, "--json", str(path), *SMALL]
    line += ["--config.model.width=128", "--config.moe.expert_width=128"]
    line += ["--config.model.dtype=bfloat16", "--config.mesh.expert=4", "--config.mesh.fsdp=2"]
    # The command sees to its environment by itself.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    process = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads(path.read_text())
    assert re.search(backend, report["backend"])
    assert report["memory"]["fits"]
    kinds = {(row["kind"].removeprefix("ragged-"), row["axes"]) for row in report["traffic"]}
    assert {("all-to-all", "expert"), ("all-gather", "fsdp")} <= kinds
    assert all(row["certain"] and row["axes"] != "unknown" for row in report["traffic"])
