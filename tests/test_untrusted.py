"""Files of strangers: no code is run, and no memory taken for what is not there."""

import io
import os
import shutil
import tracemalloc
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax.checkpoints import CheckpointError
from moe_jax.checkpoints.files import find_damage
from moe_jax.checkpoints.safetensors_files import open_safetensors
from moe_jax.data.pipeline import load_split
from moe_jax.data.tokenizers import load_tokenizer
from moe_jax.models.routers import load_choice
from moe_jax.train.log import LogError, RunLog
from moe_jax.untrusted import load_npy, load_npz, parse_json


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.fixture
def exploded(tmp_path):
    """The folder that the bomb would make; the bomb is shown to work."""
    folder = tmp_path / "exploded"
    np.save(tmp_path / "bomb.npy", np.array([Bomb(folder)], object), allow_pickle=True)
    np.load(tmp_path / "bomb.npy", allow_pickle=True)
    assert folder.exists()
    folder.rmdir()
    return folder


def bomb_files(folder):
    """{description: bytes} of arrays of objects and of bare pickles."""
    array, archive, files = np.array([Bomb(folder)], object), io.BytesIO(), {}
    npy = io.BytesIO()
    np.save(npy, array, allow_pickle=True)
    # What follows the header of an array of objects is the pickle.
    header_length = 10 + int.from_bytes(npy.getvalue()[8:10], "little")
    files["objects.npy"] = npy.getvalue()
    files["pickle.npy"] = npy.getvalue()[header_length:]
    names = ("tokens", "chosen", "step", "load", "dropped")
    np.savez(archive, allow_pickle=True, **dict.fromkeys(names, array))
    files["objects.npz"] = archive.getvalue()
    return files


def test_no_pickle_is_read(exploded, tmp_path):
    load_split_of = tmp_path / "cache"
    tokenizer = load_tokenizer("byte")
    (load_split_of / "tokens").mkdir(parents=True)
    tokens = load_split_of / "tokens" / "sotu-1.0.0-train-byte.npy"
    tokens.with_suffix(".json").write_text('{"sha256": "", "num_bytes": 1, "num_documents": 1}')
    for name, content in bomb_files(exploded).items():
        tokens.write_bytes(content)
        (tmp_path / "routing.npz").write_bytes(content)
        with pytest.raises(ValueError, match="damaged .*(Python objects|no npy file)"):
            load_split("sotu", "train", tokenizer, load_split_of)
        with pytest.raises(ValueError, match="no npz file"):
            load_choice(tmp_path / "routing.npz")
        with pytest.raises(LogError, match="routing.npz: is damaged"):
            RunLog(tmp_path, step=1)
        with pytest.raises(CheckpointError, match="no safetensors file"):
            with open_safetensors(tmp_path / "routing.npz"):
                pass
        assert not exploded.exists(), name


@pytest.fixture
def little_memory():
    """Fails if more than a megabyte was taken at a time."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def npy_header(shape, dtype="<f4"):
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@pytest.mark.parametrize("shape", [(10**15,), (10**9, 10**9), (2**62, 4), (3,), (-1, -2)])
def test_an_array_larger_than_its_file_is_refused(tmp_path, little_memory, shape):
    content = npy_header(shape) + bytes(8)
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match="claims .* bytes, but has 8|allowed: sizes >= 0"):
        load_npy(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(ValueError, match="claims .* bytes, but has 8|allowed: sizes >= 0"):
        load_npz(tmp_path / "x.npz", ["x"])


def test_a_zip_that_lies_about_a_size_is_refused(tmp_path, little_memory):
    content = npy_header((10**9,))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    size = len(content)
    lie = (4 * 10**9 + size).to_bytes(4, "little")
    data = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(data.replace(size.to_bytes(4, "little"), lie))
    with pytest.raises(ValueError, match="more than it can hold"):
        load_npz(tmp_path / "x.npz", ["x"])


def test_safetensors_larger_than_their_file_are_refused(tmp_path, little_memory):
    file = tmp_path / "x.safetensors"
    save_file({"x": np.zeros(10, np.float32)}, file)
    content = file.read_bytes()
    for shape, end in (("[1000000000000000]", "4000000000000000"), ("[1000000000000000]", "40")):
        header = f'{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}'.encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[-40:])
        with pytest.raises(CheckpointError, match="no safetensors file"):
            with open_safetensors(file):
                pass
    file.write_bytes((10**15).to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        with open_safetensors(file):
            pass


def test_arrays_come_back(tmp_path):
    arrays = {
        "c": np.arange(6, dtype=np.int32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.uint16),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found = load_npz(tmp_path / "x.npz", list(arrays))
        for name, array in arrays.items():
            np.save(tmp_path / "x.npy", array)
            for read in (found[name], load_npy(tmp_path / "x.npy")):
                assert read.dtype == array.dtype and read.shape == array.shape
                np.testing.assert_array_equal(read, array)
    with pytest.raises(ValueError, match="no npz file of more"):
        load_npz(tmp_path / "x.npz", ["more"])


def test_json_that_is_nested_too_deeply_is_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 10**5)


def test_a_list_of_files_reaches_no_other_folder(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", str(tmp_path / "secret")):
        (checkpoint / "files.json").write_text(f'{{"{name}": [1, 2363233923]}}')  # its CRC-32
        assert find_damage(checkpoint) == f"{name} is missing"
    shutil.copy(tmp_path / "secret", checkpoint / "secret")
    (checkpoint / "files.json").write_text('{"secret": [1, 2363233923]}')
    assert find_damage(checkpoint) is None
