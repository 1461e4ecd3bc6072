"""The command python -m moe_jax.convert on checkpoints of tiny models."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_jax import convert, evaluate
from moe_jax.checkpoints import Checkpoints, restore_trees, saved_arrays
from moe_jax.checkpoints.files import find_damage
from moe_jax.config import base_config, config_to_json, resolve_runs
from moe_jax.data import pipeline
from moe_jax.train.build import make_initial_state, make_model
from moe_jax.train.loop import _trees

pytestmark = pytest.mark.sweep


def tiny_config(scan_layers):
    """Dense blocks and blocks with experts in turn, and a router that carries a bias."""
    config = base_config()
    config.router = "sigmoid_top_k"
    config.data.update(sequence_length=16, batch_size=4)
    config.model.update(width=8, num_layers=4, num_heads=2, mlp_width=12, scan_layers=scan_layers)
    config.moe.update(num_experts=4, expert_width=8, every=2, implementation="einsum")
    config.mesh.update(data=1)  # of the eight devices of tests
    [run] = resolve_runs(config).values()
    return run


def random_arrays(shapes):
    """Arrays of these shapes, no two of which are alike."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.uniform(1, 9, x.shape), x.dtype), shapes)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, quick_compilation):
    """{scan_layers: workdir} with checkpoints 1 and 2 of a run."""
    runs = {}
    for scan_layers in (False, True):
        workdir = runs[scan_layers] = tmp_path_factory.mktemp("run") / "with a space"
        workdir.mkdir()
        config = tiny_config(scan_layers)
        (workdir / "config.json").write_text(config_to_json(config))
        model = make_model(config, 257)
        trees = _trees(
            random_arrays(jax.eval_shape(lambda c=config, m=model: make_initial_state(c, m)))
        )
        with Checkpoints(workdir / "checkpoints", keep_last=2, keep_best=0) as checkpoints:
            for step, cross_entropy in ((1, 2.5), (2, 3.0)):
                checkpoints.save(step, trees, cross_entropy=cross_entropy)
    return runs


@pytest.fixture
def short_text(monkeypatch):
    """Every split is the same 2,000 tokens."""
    tokens = np.resize(np.frombuffer(b"We the people of the ", np.uint8), 2000).astype(np.uint16)
    split = pipeline.TextSplit(tokens, 1999, 1)
    monkeypatch.setattr(pipeline, "load_split", lambda *arguments: split)


def command(*arguments):
    return convert.main([str(argument) for argument in arguments])


def bits_of(workdir, step=2):
    """{name: bytes} of all parameters and router state of a checkpoint."""
    shapes = saved_arrays(workdir / "checkpoints", step)
    shapes = {name: shapes[name] for name in ("params", "router_state")}
    trees = restore_trees(workdir / "checkpoints", step, convert.trees_by_name(_joined(shapes)))
    return {n: np.asarray(x).tobytes() for n, x in convert.arrays_by_name(trees).items()}


def _joined(shapes):
    return {f"{tree}/{path}": x for tree, paths in shapes.items() for path, x in paths.items()}


def test_inspect_lists_every_array(run_of, capsys):
    assert command("inspect", "--workdir", run_of[True], "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["cross_entropy"]) == (2, 3.0)
    rows = {f"{row['tree']}/{row['path']}": row for row in report["arrays"]}
    # 2 groups of scanned layers, E=4, d=8, f=8: 2*4*8*8 numbers of 4 bytes.
    row = rows["params/scanned_blocks/block_1/feed_forward/experts/w_in"]
    assert row["shape"] == [2, 4, 8, 8] and row["megabytes"] == 512 * 4 / 1e6
    fractions = [row["fraction"] for row in rows.values() if row["tree"] == "params"]
    assert sum(fractions) == pytest.approx(1)
    # 2 of 4 experts in 2 layers, each expert 2*8*8 numbers.
    assert report["parameters_total"] - report["parameters_active"] == 2 * 2 * 128
    # AdamW's two moments, and a few numbers besides.
    megabytes = report["megabytes"]
    assert 2 * megabytes["params"] < megabytes["training"] < 2 * megabytes["params"] + 1e-4
    assert rows["router_state/scanned_blocks/block_1/feed_forward/router/state/bias"]["shape"] == [
        2,
        4,
    ]

    assert command("inspect", "--workdir", run_of[True], "--step", "best") == 0
    printed = capsys.readouterr().out
    assert "step: 1, validation cross-entropy: 2.5000" in printed
    assert f"active per token: {report['parameters_active']:,}" in printed


def test_a_path_with_brackets_is_no_markup(run_of, tmp_path, capsys):
    workdir = tmp_path / "a [" / "b] [red]"  # "[/b]" would close what is not open
    shutil.copytree(run_of[True], workdir)
    assert command("inspect", "--workdir", workdir) == 0
    shown = "".join(capsys.readouterr().out.split("┏")[0].split())
    assert "".join(f"{workdir / 'checkpoints' / '2'}".split()) in shown


def test_a_pruned_copy_has_no_optimizer_and_is_evaluated(
    run_of, tmp_path, short_text, monkeypatch, capsys
):
    monkeypatch.setattr(evaluate, "_draw", lambda *arguments: [])  # which takes its time
    output = tmp_path / "pruned"
    line = ("prune", "--workdir", run_of[False], "--output", output, "--step", "best")
    assert command(*line) == 0
    before, after = (float(x.split()[-2]) for x in capsys.readouterr().out.splitlines())
    assert after < 0.6 * before
    assert find_damage(output / "checkpoints" / "1") is None
    assert not (output / "checkpoints" / "1" / "training").exists()
    assert bits_of(output, 1) == bits_of(run_of[False], 1)
    assert evaluate.main(["--workdir", str(output)]) == 0
    capsys.readouterr()
    assert command(*line) == 1
    assert "allowed: a new or empty directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scan_layers", "layers"), [(False, "blocks"), (True, "blocks"), (True, "scanned")]
)
def test_an_exported_file_comes_back_bit_for_bit(run_of, tmp_path, capsys, scan_layers, layers):
    file, back = tmp_path / "model.safetensors", tmp_path / "back"
    run = run_of[scan_layers]
    assert command("export", "--workdir", run, "--output", file, "--layers", layers) == 0
    arrays = load_file(file)
    per_layer = "params/blocks/block_3/feed_forward/experts/w_out"
    stacked = "params/scanned_blocks/block_1/feed_forward/experts/w_out"
    if layers == "blocks":
        assert arrays[per_layer].shape == (4, 8, 8)
        # All 4 layers have a norm each, and those with experts are the second and the fourth.
        assert "router_state/blocks/block_3/feed_forward/router/state/bias" in arrays
        assert not any("scanned" in name for name in arrays)
    else:
        assert arrays[stacked].shape == (2, 4, 8, 8) and per_layer not in arrays
    if scan_layers and layers == "blocks":
        shape = jax.ShapeDtypeStruct((2, 4, 8, 8), np.float32)
        whole = np.frombuffer(bits_of(run)[stacked], np.float32).reshape(shape.shape)
        np.testing.assert_array_equal(arrays[per_layer], whole[1])
    assert command("import", "--input", file, "--workdir", back) == 0
    assert bits_of(back) == bits_of(run)
    capsys.readouterr()
    assert command("inspect", "--workdir", back, "--step", "best", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cross_entropy"] == 3.0


def test_shards_with_their_index(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_MEGABYTE", 3000)  # bytes, so that a tiny model has shards
    file, back = tmp_path / "model.safetensors", tmp_path / "back"
    line = ("export", "--workdir", run_of[True], "--output", file, "--max_shard_megabytes", 1)
    assert command(*line) == 0
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and not file.exists()
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    contents = {shard.name: load_file(shard) for shard in shards}
    for name, shard in index["weight_map"].items():
        assert name in contents[shard]
    sizes = [sum(x.nbytes for x in arrays.values()) for arrays in contents.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    for size, arrays in zip(sizes, contents.values(), strict=True):
        assert size <= 3000 or len(arrays) == 1
    assert command("import", "--input", file, "--workdir", back) == 0
    assert bits_of(back) == bits_of(run_of[True])
    [run] = evaluate.find_runs(back)
    _, variables = evaluate._load_model(run, 257)
    assert set(variables) == {"params", "router_state"}

    missing = index | {"weight_map": {"x": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(missing))
    assert command("import", "--input", file, "--workdir", tmp_path / "outside") == 1


@pytest.fixture
def exported(run_of, tmp_path):
    """(change of arrays and metadata) -> the line that imports the changed file."""

    def make(change):
        file = tmp_path / "model.safetensors"
        assert command("export", "--workdir", run_of[False], "--output", file) == 0
        arrays, [metadata] = load_file(file), [_metadata(file)]
        change(arrays, metadata)
        save_file(arrays, file, metadata)
        return "import", "--input", file, "--workdir", tmp_path / "back"

    return make


def _metadata(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"]


NORM = "params/final_norm/scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: a.pop(NORM), f"the file misses {NORM}"),
        (lambda a, m: a.update(more=np.zeros(2)), "the file has what this model has not: more"),
        (lambda a, m: a.update({NORM: np.ones(9, np.float32)}), f"{NORM}: got float32[9]; allowed"),
        (lambda a, m: a.update({NORM: np.ones(8)}), f"{NORM}: got float64[8]; allowed: float32[8]"),
        (lambda a, m: a.update({NORM: a[NORM] * np.nan}), "NaN or infinite"),
        (lambda a, m: m.pop("format"), "got format None, version 1; allowed: moe_jax, 1"),
        (lambda a, m: m.update(format_version="2"), "version 2; allowed: moe_jax, 1"),
        (lambda a, m: m.update(step="x"), "the metadata is damaged"),
        (lambda a, m: m.update(step="-1"), "step: got -1; allowed: 0..2147483647"),
        (lambda a, m: m.update(cross_entropy="nan"), "cross_entropy: got nan; allowed: finite"),
        (lambda a, m: m.pop("config"), "the metadata is damaged: 'config'"),
        (lambda a, m: m.update(config="[]"), "config: got JSON list"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(exported, capsys, change, message):
    assert command(*exported(change)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("name", ["prune", "export"])
def test_a_damaged_checkpoint_is_named(run_of, tmp_path, capsys, name):
    shutil.copytree(run_of[False], tmp_path / "run")
    victim = tmp_path / "run" / "checkpoints" / "2" / "params" / "_METADATA"
    victim.write_bytes(victim.read_bytes()[:-1])
    output = tmp_path / "out.safetensors"
    assert command(name, "--workdir", tmp_path / "run", "--output", output) == 1
    assert "2 is damaged: params/_METADATA has" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required"),
        ("inspect", "--workdir"),
        ("inspect --workdir nowhere", "'nowhere', which has no config.json"),
        ("inspect --workdir RUN --step 3", "--step: got 3; allowed in"),
        ("inspect --workdir RUN --stp 3", "unrecognized arguments"),
        ("prune --workdir RUN --output OUT --keep params", "--keep: got 'params'; allowed: params"),
        ("prune --workdir RUN --output OUT --keep params,router_state,x", "allowed: params,router"),
        ("prune --workdir RUN --output RUN", "allowed: a new or empty directory"),
        ("export --workdir RUN --output OUT", "allowed: a file named *.safetensors"),
        ("export --workdir RUN --output OUT --layers all", "invalid choice: 'all'"),
        (
            "export --workdir RUN --output O --max_shard_megabytes 0",
            "got 0; allowed: whole numbers",
        ),
        ("import --input nothing.safetensors --workdir OUT", "no safetensors file"),
        ("import --input nothing.safetensors --workdir RUN", "allowed: a new or empty directory"),
    ],
)
def test_a_users_mistake_is_one_line(run_of, tmp_path, capsys, line, message):
    places = {"RUN": run_of[False], "OUT": tmp_path / "out"}
    assert command(*(places.get(word, word) for word in line.split())) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


def test_a_workdir_of_several_runs_names_them(tmp_path, capsys):
    config = base_config()
    config.variants = {"dense": {"moe": {"num_experts": 0}}, "moe": {}}
    (tmp_path / "config.json").write_text(config_to_json(config))
    assert command("inspect", "--workdir", tmp_path) == 1
    assert f"has the runs dense, moe; allowed: one of them, such as {tmp_path / 'dense'}" in (
        capsys.readouterr().err
    )


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        convert.main(["--help"])
    assert stop.value.code == 0
    assert "example: python -m moe_jax.convert inspect --workdir" in capsys.readouterr().out
