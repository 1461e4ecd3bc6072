"""The command python -m moe_jax.evaluate on small runs of real text."""

import json

import numpy as np
import pytest

from moe_jax import evaluate
from moe_jax.data import pipeline
from moe_jax.train.__main__ import main as train

pytestmark = pytest.mark.sweep
CONFIG_FILE = """
from moe_jax.config import base_config

def get_config():
    config = base_config()
    config.steps = 4
    config.log_every_steps = 1
    config.evaluate_every_steps = 2
    config.evaluate_batches = 1
    config.checkpoint_every_steps = 2
    config.data.sequence_length = 64
    config.data.batch_size = 8
    config.data.cache_dir = {cache_dir!r}
    config.model.width = 8
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.mlp_width = 20
    config.model.dropout = 0.1
    config.moe.num_experts = 4
    config.moe.expert_width = 8
    config.mesh.data = 1  # of the eight devices of tests
    config.optimizer.warmup_steps = 1
    config.variants = {{
        "dropless": {{}},
        "capacity": {{"moe": {{"capacity_factor": 0.5, "implementation": "sorted"}}}},
        "dense": {{"moe": {{"num_experts": 0}}}},
    }}
    return config
"""


@pytest.fixture(scope="module", autouse=True)
def short_text():
    """Leaves the first 5,000 bytes of each split: every part of the command runs, and soon."""
    load_split = pipeline.load_split

    def shortened(*arguments):
        tokens = load_split(*arguments).tokens[:5000]
        return pipeline.TextSplit(tokens, int(np.sum(tokens < 256)), int(np.sum(tokens == 256)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "load_split", shortened)
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, quick_compilation):
    folder = tmp_path_factory.mktemp("evaluate with a space")
    config = folder / "tiny.py"
    config.write_text(CONFIG_FILE.format(cache_dir=str(folder / "cache")))
    assert train(["--config", str(config), "--workdir", str(folder / "runs")]) == 0
    return folder / "runs"


def read(workdir):
    rows = json.loads((workdir / "evaluation.json").read_text())["runs"]
    return {row["name"]: row for row in rows}


def test_table_json_and_pictures(workdir, capsys):
    assert evaluate.main(["--workdir", str(workdir)]) == 0
    printed = capsys.readouterr().out
    for word in ("dropless", "capacity", "dense", "unigram", "bigram", "perplexity", "load CV"):
        assert word in printed
    rows = read(workdir)
    assert set(rows) == {"dropless", "capacity", "dense"}
    assert rows["dropless"]["dropped_fraction_mean"] == 0
    assert rows["capacity"]["dropped_fraction_mean"] > 0.4  # half of the places, all tokens
    assert "load_cv_mean" not in rows["dense"]
    for row in rows.values():
        assert row["split"] == "test" and row["step"] == 4
        # Tokens are bytes here, but for the end of each document.
        bits = row["cross_entropy"] / np.log(2) * row["num_tokens"] / row["num_bytes"]
        np.testing.assert_allclose(row["bits_per_byte"], bits)
        np.testing.assert_allclose(row["perplexity"], np.exp(row["cross_entropy"]))
        name = row["name"]
        assert json.loads((workdir / name / "evaluation.json").read_text()) == row
    # Experts of width 8, two per token, and a router of 4 experts cost as a dense layer of 18.
    assert rows["dropless"]["parameters_total"] > rows["dense"]["parameters_total"]
    with np.load(workdir / "dropless" / "evaluation_load.npz", allow_pickle=False) as arrays:
        assert arrays["load"].sum() == 2 * rows["dropless"]["num_tokens"]
    for file in ("loss_curves", "expert_load_dropless", "routing_over_time_capacity"):
        for suffix in ("png", "csv"):
            assert (workdir / "pictures" / f"{file}.{suffix}").stat().st_size > 100
    page = (workdir / "pictures" / "token_map_dropless.html").read_text()
    assert page.startswith("<!") and "http" not in page.split("<body")[1]


def test_batch_size_does_not_matter_without_a_capacity(workdir):
    found = []
    for batch_size in (1, 7, 32):
        assert evaluate.main(["--workdir", str(workdir), "--batch_size", str(batch_size)]) == 0
        rows = read(workdir)
        assert rows["dropless"]["batch_size"] == batch_size
        found.append((rows["dropless"]["cross_entropy"], rows["dense"]["cross_entropy"]))
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=1e-6)


def test_twice_the_same_to_the_bit(workdir):
    rows = []
    for _ in range(2):
        assert evaluate.main(["--workdir", str(workdir), "--split", "validation"]) == 0
        rows.append(read(workdir))
    assert rows[0] == rows[1]
    assert rows[0]["dense"]["split"] == "validation"


def test_another_checkpoint(workdir):
    assert evaluate.main(["--workdir", str(workdir), "--step", "2"]) == 0
    assert read(workdir)["dense"]["step"] == 2
    assert evaluate.main(["--workdir", str(workdir), "--best"]) == 0
    assert read(workdir)["dense"]["step"] in (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workdir"),
        (["--workdir", "nowhere"], "'nowhere', which has no config.json"),
        (["--workdir", "WORKDIR", "--step", "3"], "--step: got 3; allowed in"),
        (["--workdir", "WORKDIR", "--step", "x"], "invalid int value"),
        (["--workdir", "WORKDIR", "--split", "train"], "invalid choice: 'train'"),
        (["--workdir", "WORKDIR", "--batch_size", "0"], "--batch_size: got 0; allowed: whole"),
        (["--workdir", "WORKDIR", "--step", "2", "--best"], "not allowed with"),
        (["--workdir", "WORKDIR", "--steps", "2"], "unrecognized arguments"),
    ],
)
def test_a_users_mistake_is_one_line(workdir, capsys, arguments, message):
    arguments = [str(workdir) if a == "WORKDIR" else a for a in arguments]
    assert evaluate.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_a_damaged_checkpoint_is_named(workdir, capsys):
    victim = max((workdir / "dense" / "checkpoints" / "4" / "params").rglob("*"), key=_size)
    content = victim.read_bytes()
    victim.write_bytes(content[:-1])
    try:
        assert evaluate.main(["--workdir", str(workdir)]) == 1
    finally:
        victim.write_bytes(content)
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b"garbage\n", b'{"a": 1}\n', b"\xff\n"])
def test_damaged_metrics_are_told_of_before_the_work(workdir, capsys, line):
    path = workdir / "dense" / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(line + content)
    try:
        assert evaluate.main(["--workdir", str(workdir)]) == 1
    finally:
        path.write_bytes(content)
    printed = capsys.readouterr()
    assert "metrics.jsonl: line 1 is damaged" in printed.err and "perplexity" not in printed.out


def test_a_run_without_metrics_has_a_row_and_no_curve(workdir, capsys):
    path = workdir / "dropless" / "metrics.jsonl"
    path.rename(path.with_suffix(".away"))
    try:
        assert evaluate.main(["--workdir", str(workdir)]) == 0
    finally:
        path.with_suffix(".away").rename(path)
    assert read(workdir)["dropless"]["train_tokens_per_second"] is None


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--help"])
    assert stop.value.code == 0
    assert "example: python -m moe_jax.evaluate --workdir runs/demo" in capsys.readouterr().out


def _size(path):
    return path.stat().st_size if path.is_file() else 0
