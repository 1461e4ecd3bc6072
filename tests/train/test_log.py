import csv

import numpy as np
import pytest

from moe_jax.train.log import LogError, RunLog, read_metrics


def write(log, step, experts=4):
    log.write_scalars(step, "train", {"loss": 1.0 / step, "load_cv_mean": 0.5})
    log.write_routing(step, np.full((2, experts), step), np.zeros((2, experts)))
    if step % 2 == 0:
        log.write_scalars(step, "validation", {"cross_entropy": 1.0 + step})


def test_files_of_a_run(tmp_path):
    log = RunLog(tmp_path, step=0)
    for step in (1, 2):
        write(log, step)
    log.close()
    rows = read_metrics(tmp_path)
    assert rows[0] == {"step": 1, "split": "train", "loss": 1.0, "load_cv_mean": 0.5}
    assert [(row["step"], row["split"]) for row in rows] == [
        (1, "train"),
        (2, "train"),
        (2, "validation"),
    ]
    with (tmp_path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert table[2] == {
        "step": "2",
        "split": "validation",
        "loss": "",
        "load_cv_mean": "",
        "cross_entropy": "3.0",
    }
    with np.load(tmp_path / "routing.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["dropped", "load", "step"]
        assert all(arrays[name].dtype == np.int32 for name in arrays)
        np.testing.assert_array_equal(arrays["step"], [1, 2])
        assert arrays["load"].shape == arrays["dropped"].shape == (2, 2, 4)
        assert arrays["load"][1, 0, 0] == 2


def test_rows_beyond_the_restored_step_are_cut(tmp_path):
    log = RunLog(tmp_path, step=0)
    for step in (1, 2, 3, 4):
        write(log, step)
    log.close()
    log = RunLog(tmp_path, step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 2]
    for step in (3, 4):
        write(log, step)
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 2, 3, 4, 4]
    with np.load(tmp_path / "routing.npz") as arrays:
        np.testing.assert_array_equal(arrays["step"], [1, 2, 3, 4])
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 6
    assert not list(tmp_path.glob("*tmp*"))


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    RunLog(tmp_path, step=0).close()
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\n{"step": 2, "sp')
    log = RunLog(tmp_path, step=2)
    log.write_scalars(2, "train", {"loss": 1.0})
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_damaged_line_elsewhere_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1\n{"step": 2, "split": "train"}\n')
    with pytest.raises(LogError):
        read_metrics(tmp_path)


def test_what_is_not_finite_becomes_null(tmp_path):
    log = RunLog(tmp_path, step=0)
    log.write_scalars(1, "train", {"loss": 1.0, "z": float("inf"), "load_cv_mean": float("nan")})
    log.close()
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "split": "train", "loss": 1.0, "z": null, "load_cv_mean": null}'
    assert tags(tmp_path / "tensorboard") == {"train/loss": 1}


def tags(directory):
    """The series of the TensorBoard files in a directory and the number of points of each."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in directory.iterdir():
        content = path.read_bytes()
        start = 0
        while start < len(content):  # records: length u64, its CRC u32, data, its CRC u32
            length = int.from_bytes(content[start : start + 8], "little")
            event = event_pb2.Event.FromString(content[start + 12 : start + 12 + length])
            for value in event.summary.value:
                found[value.tag] = found.get(value.tag, 0) + 1
            start += 12 + length + 4
    return found


@pytest.mark.parametrize("experts", [2, 64])
def test_tensorboard_has_a_series_per_scalar_whatever_the_number_of_experts(tmp_path, experts):
    log = RunLog(tmp_path, step=0)
    for step in (1, 2):
        write(log, step, experts)
    log.close()
    assert tags(tmp_path / "tensorboard") == {
        "train/loss": 2,
        "train/load_cv_mean": 2,
        "validation/cross_entropy": 1,
    }


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"\n",
        b'{"a": 1}\n',
        b"3\n",
        b"\xff\n",
        b'{"step": "1", "split": "train"}\n',
        b'{"step": 1, "split": "train", "loss": NaN}\n',
        b'{"step": 1, "split": "\\ud800"}\n',
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    good = b'{"step": 1, "split": "train"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + good)
    with pytest.raises(LogError, match=r"metrics.jsonl: line 2 is damaged"):
        read_metrics(tmp_path)


def test_an_array_file_of_another_model_is_named(tmp_path):
    with RunLog(tmp_path, step=0) as log:
        write(log, 1)
    with RunLog(tmp_path, step=1) as log, pytest.raises(LogError, match=r"\[2, 4\], this run has"):
        log.write_routing(2, np.zeros((2, 5)), np.zeros((2, 5)))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut short"])
def test_a_damaged_array_file_is_named(tmp_path, content):
    (tmp_path / "routing.npz").write_bytes(content)
    with pytest.raises(LogError, match="routing.npz: is damaged"):
        RunLog(tmp_path, step=1)
