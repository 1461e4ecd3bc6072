from pathlib import Path

import pytest

from moe_jax.data.cache import atomic_write, cache_directory


def test_cache_directory_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOE_JAX_CACHE", "~/explicit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory(tmp_path / "mine") == tmp_path / "mine"
    assert cache_directory("~/mine") == tmp_path / "home" / "mine"
    assert cache_directory() == tmp_path / "home" / "explicit"
    monkeypatch.delenv("MOE_JAX_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "moe_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "moe_jax"
    assert not (tmp_path / "home").exists()


def test_atomic_write_replaces_the_file(tmp_path):
    path = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        with atomic_write(path) as out:
            out.write(content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_atomic_write_that_fails_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(path) as out:
        out.write(b"half of the new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once_both_succeed(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write(b"first")
        second.write(b"second")
    # The inner block ends first, so the outer one is the last to replace the file.
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
