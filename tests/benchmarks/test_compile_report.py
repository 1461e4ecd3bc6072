"""The report of the compilers, of one small layer."""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import compile_report, report

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


def test_rows_of_an_earlier_run_are_read_back(tmp_path):
    path, row = tmp_path / "compile_report.csv", dict.fromkeys(compile_report.COLUMNS)
    row |= dict(program="layer, 8 experts", target="v5p", backend="dense", gflop=1.5, collectives=0)
    failed = dict.fromkeys(compile_report.COLUMNS) | dict(row, backend="tokamax", note="no, sir")
    report.write_csv(path, [row, failed])
    read = compile_report.read_rows(path)
    assert list(read.values()) == [row, failed]
    assert read["layer, 8 experts", "v5p", "dense"] == row
    assert compile_report.read_rows(tmp_path / "none.csv") == {}


def test_a_stopped_run_goes_on(monkeypatch):
    named = dict(program="layer", target="v5p", jax=jax.__version__)
    dense = named | dict(backend="dense", gflop=1.5, compile_seconds=1.0, note=None)
    work = [("layer", name, None, ()) for name in ("dense", "tokamax", "failed", "old")]
    monkeypatch.setattr(compile_report, "programs", lambda target, sizes: work)
    measured = []

    def measure(target, program, backend, function, arguments, against):
        measured.append((backend, against))
        return dict(dense, backend=backend)

    monkeypatch.setattr(compile_report, "measure", measure)
    failed, old = dict(dense, backend="failed", note="no"), dict(dense, backend="old", jax="0.1")
    done = {("layer", "v5p", row["backend"]): row for row in (dense, failed, old)}
    rows = list(compile_report.measure_all(["v5p"], {}, done, with_train_step=False))
    assert rows[0] is dense and len(rows) == 4
    assert measured == [(name, dense) for name in ("tokamax", "failed", "old")]


def test_an_unknown_target_is_refused():
    run = subprocess.run([*COMMAND, "--targets", "v1"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "--targets: got 'v1'; allowed: v5e, v5p, v6e, h100" in run.stderr
