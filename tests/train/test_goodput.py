import json

import pytest

from moe_jax.train import goodput
from moe_jax.train.goodput import PARTS, Goodput, describe


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by its item "now"."""
    times = {"now": 100.0}
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: times["now"])
    return times


def test_parts_add_up_over_restarts(tmp_path, clock):
    first = Goodput(tmp_path)
    with first.spent("compiling"):
        clock["now"] += 5
    clock["now"] += 2
    first.prepared()
    for _ in range(2):
        clock["now"] += 10
        with first.spent("saving"):
            clock["now"] += 1.5
    seconds = first.write(7, idle_seconds=4.0)
    expected = dict(
        training=16.0, preparing=2.0, compiling=5.0, validation=0.0, saving=3.0, data=4.0
    )
    assert seconds == expected
    summary = {"step": 7, "restarts": 0, "seconds": expected}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert describe(seconds) == (
        "30 s: training 53 %, preparing 7 %, compiling 17 %, saving 10 %, data 13 %"
    )

    second = Goodput(tmp_path)
    clock["now"] += 20
    second.prepared()
    second.write(9)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["restarts"] == 1 and summary["seconds"] == expected | {"preparing": 22.0}


def summary_of(restarts="0", training="1.0"):
    others = ", ".join(f'"{part}": 1.0' for part in PARTS if part != "training")
    return f'{{"restarts": {restarts}, "seconds": {{"training": {training}, {others}}}}}'


NO_NUMBERS = [
    summary_of(restarts="1e999"),
    *(summary_of(training=value) for value in ("NaN", "Infinity", "-5", "1" + 400 * "0")),
]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"seconds": {}}', '{"seconds": 3}', *NO_NUMBERS], ids=range(9)
)
def test_a_damaged_summary_is_begun_anew(tmp_path, clock, content):
    (tmp_path / "summary.json").write_text(content)
    clock["now"] += 1
    assert sum(Goodput(tmp_path).write(3).values()) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["restarts"] == 0
