"""Any damage to any file, and any value in a config, ends in success or in a documented error.

The examples are the same every time. Damage of bytes finds what a parser does; damage of what the
bytes say, with checksums made to fit, finds what comes after it.
"""

import contextlib
import functools
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moe_jax import convert, evaluate
from moe_jax.checkpoints import CheckpointError, Checkpoints, restore_trees, saved_arrays
from moe_jax.checkpoints.files import check_checkpoint, write_manifest
from moe_jax.checkpoints.names import gather
from moe_jax.checkpoints.safetensors_files import open_safetensors
from moe_jax.config import (
    FIELDS,
    ConfigError,
    base_config,
    config_from_json,
    config_to_json,
    resolve_runs,
    validate,
)
from moe_jax.data import pipeline, tokenizers
from moe_jax.models.routers import load_choice, save_choice
from moe_jax.train.log import LogError, RunLog, read_metrics
from moe_jax.train.workdir import prepare_workdir

pytestmark = pytest.mark.sweep

TEXT = "ab ab ab"


def fuzz(examples):
    return settings(
        derandomize=True,
        max_examples=examples,
        deadline=10_000,  # milliseconds: nothing hangs
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def allowed(*errors):
    """Passes if there is no error, or one of these in one line."""
    try:
        yield
    except errors as error:
        assert "\n" not in str(error) and str(error)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([10**15, -(10**15), 10**400, 2**63, 0.5, -0.0, 1e308, float("nan")]),
    st.text(max_size=3),
    st.sampled_from(["", "..", "/", "\ud800", "\0", "a.b", "x" * 300, "softmax_top_k", "byte"]),
    st.lists(st.integers(0, 1), max_size=2),
    st.dictionaries(st.sampled_from(["", "a", "a.b", "get", "_fields", "\ud800"]), st.none()),
)
PIECES = [b"", b"\0", b"\xff", b'"', b"{", b"[]", b"-", b"1e999", b"null", b"\\ud800", b"9" * 5000]


@st.composite
def damaged(draw, content):
    """``content`` with some bytes changed, cut out, put in, or the end cut off."""
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(content)))
        last = draw(st.sampled_from([first, first + 1, first + 8, len(content)]))
        content = (
            content[:first] + draw(st.sampled_from(PIECES) | st.binary(max_size=8)) + content[last:]
        )
    return content


@st.composite
def changed(draw, value):
    """The JSON ``value`` with something in it replaced, renamed or left out."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 4)) == 0:
        return draw(JUNK)
    copy = value.copy()
    keys = range(len(value)) if isinstance(value, list) else list(value)
    key = draw(st.sampled_from(keys))
    what = draw(st.sampled_from(["change", "change", "change", "leave out", "rename"]))
    if what == "change":
        copy[key] = draw(changed(value[key]))
    else:
        del copy[key]
        if what == "rename" and isinstance(value, dict):
            copy[draw(st.text(max_size=3))] = value[key]
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tiny_data():
    """Replaces the data set by a sentence."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline, tokenizers):
            patch.setattr(module, "load_documents", lambda *arguments: iter([TEXT]))
        yield


def test_any_value_of_any_field():
    text = config_to_json(base_config())

    @fuzz(120)
    @given(st.dictionaries(st.sampled_from(list(FIELDS)), JUNK, min_size=1, max_size=3))
    def check(values):
        with allowed(ConfigError):
            tree = json.loads(text)
            for path, value in values.items():
                *sections, name = path.split(".")
                functools.reduce(dict.__getitem__, sections, tree)[name] = value
            config = config_from_json(json.dumps(tree))
            validate(config)
            config_to_json(config)

    check()


def test_configs_of_workdirs(folder):
    [run] = resolve_runs(base_config()).values()
    text = config_to_json(run)
    workdir = folder / "workdir"
    (workdir / "checkpoints" / "3").mkdir(parents=True)

    def read(content):
        (workdir / "config.json").write_bytes(content)
        with allowed(ConfigError):
            evaluate.find_runs(workdir)
        with allowed(ConfigError):
            convert.find_run(workdir)
        with allowed(ConfigError):
            prepare_workdir(workdir, run)

    @fuzz(40)
    @given(damaged(text.encode()))
    def check_bytes(content):
        read(content)

    @fuzz(60)
    @given(changed(json.loads(text) | {"variants": {"a": {"steps": 3}}}))
    def check_values(values):
        read(json.dumps(values).encode())

    check_bytes()
    check_values()


def test_token_caches(folder, tiny_data):
    byte = tokenizers.load_tokenizer("byte")
    pipeline.load_split("sotu", "train", byte, folder)
    files = {path.suffix: path for path in (folder / "tokens").iterdir()}
    contents = {suffix: path.read_bytes() for suffix, path in files.items()}

    def read(suffix, content):
        for other, path in files.items():
            path.write_bytes(content if other == suffix else contents[other])
        with allowed(ValueError):
            split = pipeline.load_split("sotu", "train", byte, folder)
            assert max(split.tokens) < byte.vocab_size

    @fuzz(150)
    @given(st.data())
    def check(data):
        suffix = data.draw(st.sampled_from([".npy", ".json"]))
        read(suffix, data.draw(damaged(contents[suffix])))

    @fuzz(50)
    @given(changed(json.loads(contents[".json"])))
    def check_summary(values):
        read(".json", json.dumps(values).encode())

    @fuzz(30)
    @given(st.sampled_from(["u2", ">u2", "f4", "S3", "M8[s]", "V2"]), st.integers(0, 9))
    def check_array(dtype, size):
        array = np.zeros(size, "u2").astype(dtype) if dtype != "V2" else np.zeros(size, "V2")
        np.save(files[".npy"], array)
        summary = json.loads(contents[".json"]) | {
            "sha256": hashlib.sha256(array.tobytes()).hexdigest()
        }
        files[".json"].write_text(json.dumps(summary))
        with allowed(ValueError):
            pipeline.load_split("sotu", "train", byte, folder)

    check()
    check_summary()
    check_array()


def test_tokenizers(folder, tiny_data):
    tokenizers.load_tokenizer("bpe", "sotu", 259, folder)
    [path] = (folder / "tokenizers").iterdir()
    content = path.read_bytes()
    model = json.loads(json.loads(content)["model"])

    def read():
        with allowed(ValueError):
            tokenizer = tokenizers.load_tokenizer("bpe", "sotu", 259, folder)
            assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT

    @fuzz(80)
    @given(damaged(content))
    def check_bytes(content):
        path.write_bytes(content)
        read()

    @fuzz(150)
    @given(changed(model) | changed(model["model"]).map(lambda inner: {"model": inner}))
    def check_model(model):
        text = json.dumps(model)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"sha256": digest, "model": text}))
        read()

    check_bytes()
    check_model()


def test_files_of_numbers(folder):
    run = folder / "run"
    run.mkdir()
    with RunLog(run, step=0) as log:
        for step in (1, 2):
            log.write_scalars(step, "train", {"loss": 1.5, "z": None or float("nan")})
            log.write_routing(step, np.ones((2, 3)), np.zeros((2, 3)))
    save_choice(folder / "choice.npz", np.ones((2, 3), np.int32), jnp.ones((1, 6, 2), jnp.int32))
    contents = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "routing.npz")}
    choice = (folder / "choice.npz").read_bytes()
    shutil.rmtree(run / "tensorboard")

    def read():
        with allowed(LogError):
            for row in read_metrics(run):
                assert type(row["step"]) is int and isinstance(row["split"], str)
        with allowed(LogError):
            RunLog(run, step=1).close()
        shutil.rmtree(run / "tensorboard", ignore_errors=True)

    @fuzz(120)
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(list(contents)))
        for other, content in contents.items():
            (run / other).write_bytes(data.draw(damaged(content)) if other == name else content)
        read()

    @fuzz(60)
    @given(changed(json.loads(contents["metrics.jsonl"].splitlines()[0])))
    def check_row(row):
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (run / "routing.npz").write_bytes(contents["routing.npz"])
        read()

    @fuzz(100)
    @given(damaged(choice))
    def check_choice(content):
        (folder / "choice.npz").write_bytes(content)
        with allowed(ValueError):
            load_choice(folder / "choice.npz")

    check()
    check_row()
    check_choice()


def test_safetensors(folder):
    file = folder / "x.safetensors"
    [run] = resolve_runs(base_config()).values()
    arrays = {f"params/blocks/block_{i}/w": np.full(3, i, np.float32) for i in range(2)}
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    metadata = {"format": "moe_jax", "format_version": "1", "step": "3"}
    save_file(arrays, file, metadata | {"config": config_to_json(run)})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])

    def read(content):
        file.write_bytes(content)
        with allowed(CheckpointError, ConfigError), open_safetensors(file) as reader:
            wanted = {"params/scanned_blocks/block_0/w": shape}
            gather(wanted, reader.shapes, reader.read)
            convert._read_metadata(file, reader)

    @fuzz(150)
    @given(damaged(content))
    def check_bytes(content):
        read(content)

    @fuzz(200)
    @given(changed(header))
    def check_header(header):
        text = json.dumps(header).encode()
        read(len(text).to_bytes(8, "little") + text + content[8 + length :])

    @fuzz(60)
    @given(changed({"metadata": {}, "weight_map": {name: file.name for name in arrays}}))
    def check_index(index):
        (folder / "y.safetensors.index.json").write_text(json.dumps(index))
        file.write_bytes(content)
        with allowed(CheckpointError), open_safetensors(folder / "y.safetensors"):
            pass

    read(content)
    check_bytes()
    check_header()
    check_index()


def test_checkpoints(folder):
    directory = folder / "checkpoints"
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    with Checkpoints(directory, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(1, {"params": params}, cross_entropy=1.0)
    checkpoint, like = directory / "1", jax.eval_shape(lambda: params)
    manifest = (checkpoint / "files.json").read_bytes()
    files = sorted(p for p in (checkpoint / "params").rglob("*") if p.is_file())
    contents = {path: path.read_bytes() for path in files}

    @fuzz(100)
    @given(damaged(manifest))
    def check_manifest(content):
        (checkpoint / "files.json").write_bytes(content)
        with allowed(CheckpointError):
            check_checkpoint(directory, 1)

    @fuzz(60)
    @given(changed(json.loads(manifest)))
    def check_list(files):
        (checkpoint / "files.json").write_text(json.dumps(files))
        with allowed(CheckpointError):
            check_checkpoint(directory, 1)

    @fuzz(40)
    @given(st.data())
    def check_files(data):
        victim = data.draw(st.sampled_from(files))
        victim.write_bytes(data.draw(damaged(contents[victim])))
        write_manifest(checkpoint)
        try:
            with allowed(CheckpointError):
                saved_arrays(directory, 1)
            with allowed(CheckpointError):
                restore_trees(directory, 1, {"params": like})
        finally:
            victim.write_bytes(contents[victim])

    check_manifest()
    check_list()
    check_files()
