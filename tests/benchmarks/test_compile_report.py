"""The report of the compilers, of one small layer."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.compile_report"]


@pytest.mark.compiler
def test_reports_every_target(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compilers for accelerators are not installed")
    command = [*COMMAND, "--quick", "--targets", "v5p,h100", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with open(tmp_path / "compile_report.csv", encoding="utf-8") as file:
        rows = {(row["target"], row["backend"]): row for row in csv.DictReader(file)}
    tpu, gpu = rows["v5p", "pallas_tpu"], rows["h100", "mosaic_gpu"]
    assert tpu["note"] == gpu["note"] == ""
    # The router is a fiftieth of the work at this size.
    assert 0.9 < float(tpu["flops_over_dense"]) < 1.1
    assert 0 < int(gpu["registers"]) <= 255 and gpu["spill_bytes"] == "0"


def test_an_unknown_target_is_refused():
    run = subprocess.run([*COMMAND, "--targets", "v1"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "--targets: got 'v1'; allowed: v5e, v5p, v6e, h100" in run.stderr
