import gzip
import json

import pytest

from moe_jax.train.__main__ import main
from moe_jax.train.trace import StepTrace


@pytest.mark.sweep
def test_a_run_traces_some_steps(command, tmp_path, capsys):
    """Of ten steps the last five, each by its number."""
    assert main(command(tmp_path, "--profile", "--config.evaluate_every_steps=100")) == 0
    assert f"trace of 5 steps in {tmp_path / 'profile'}" in capsys.readouterr().out
    [path] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {e["args"]["step_num"] for e in events if e.get("name") == "train" and "args" in e}
    assert {int(step) for step in steps} == {6, 7, 8, 9, 10}


def test_nothing_is_traced_unasked(tmp_path):
    trace = StepTrace(None)
    for step in range(20):
        with trace.watch(step):
            assert not trace.is_complete()
    assert trace.close() is None
