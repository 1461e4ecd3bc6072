import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.checkpoints import (
    CheckpointError,
    Checkpoints,
    best_step,
    manager,
    restore_trees,
    saved_steps,
    set_aside_damaged,
)
from moe_jax.checkpoints.files import find_damage
from moe_jax.sharding import make_mesh, shardings_of


def make_trees(seed=0, width=64):
    """Trees like those of a run: parameters, moments, a count, a key."""
    kernel = jax.random.normal(jax.random.key(seed), (width, width))
    params = {"layer": {"kernel": kernel, "bias": jnp.arange(4.0)}}
    optimizer = optax.adamw(1e-3)
    _, opt_state = optimizer.update(params, optimizer.init(params), params)
    key = jax.random.key_data(jax.random.key(seed))
    return {
        "params": params,
        "training": {"step": jnp.asarray(seed, jnp.int32), "opt_state": opt_state, "key": key},
    }


def open_checkpoints(directory, keep_last=3, keep_best=0):
    return Checkpoints(directory, keep_last=keep_last, keep_best=keep_best)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def read_files(directory):
    files = (p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints 1 and 2, to be copied."""
    directory = tmp_path_factory.mktemp("saved")
    with open_checkpoints(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_trees(step), cross_entropy=3.0 - step)
    return directory


def test_everything_comes_back_bit_for_bit(saved):
    like = jax.eval_shape(lambda: make_trees(0))
    with open_checkpoints(saved) as checkpoints:
        restored = checkpoints.restore(2, like)
    assert_same_bits(restored, make_trees(2))


def test_parameters_alone_come_back(saved):
    like = jax.eval_shape(lambda: make_trees(0)["params"])
    assert_same_bits(restore_trees(saved, 1, {"params": like})["params"], make_trees(1)["params"])
    assert best_step(saved) == 2  # cross-entropies 2 and 1


def test_donated_arrays_may_change_while_files_are_written(tmp_path):
    add_one = jax.jit(lambda trees: jax.tree.map(lambda x: x + 1, trees), donate_argnums=0)
    trees = {"params": {"kernel": jnp.zeros((600, 600))}}
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            trees = add_one(trees)
            checkpoints.save(step, trees)
            for _ in range(20):
                trees = add_one(trees)
    for step, value in ((1, 1.0), (2, 22.0), (3, 43.0)):
        kernel = restore_trees(tmp_path, step, {"params": trees["params"]})["params"]["kernel"]
        np.testing.assert_array_equal(kernel, np.full((600, 600), value))


def test_the_latest_and_the_best_are_kept(tmp_path):
    cross_entropies = {1: 2.0, 2: 1.0, 3: 3.0, 4: None, 5: 2.5, 6: None}
    for steps in ((1, 2, 3), (4, 5, 6)):  # in two processes' worth: the best is found again
        with open_checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
            for step in steps:
                trees = make_trees(step, width=4)
                checkpoints.save(step, trees, cross_entropy=cross_entropies[step])
    assert saved_steps(tmp_path) == [2, 5, 6]
    assert best_step(tmp_path) == 2


def test_without_best_only_the_latest_are_kept(tmp_path):
    with open_checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_trees(width=4), cross_entropy=float(step))
    assert saved_steps(tmp_path) == [3]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["params", "training"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, value, where):
    trees = make_trees(1, width=4)
    if where == "params":
        trees["params"]["layer"]["bias"] = trees["params"]["layer"]["bias"].at[2].set(value)
    else:
        trees["training"]["opt_state"] = jax.tree.map(
            lambda x: x * value if x.dtype == jnp.float32 else x, trees["training"]["opt_state"]
        )
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_trees(1, width=4))
        with pytest.raises(FloatingPointError, match="step 2"):
            checkpoints.save(2, trees)
    assert saved_steps(tmp_path) == [1]


def damage_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path):
    path.write_bytes(b"")


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


# What orbax itself does not read again.
UNCHECKED = ("_CHECKPOINT_METADATA", "commit_success.txt")


@pytest.mark.parametrize("damage", [damage_half, damage_empty, damage_bit, os.remove])
def test_any_damaged_file_is_found_and_the_good_checkpoint_named(saved, tmp_path, damage):
    original = saved
    like = jax.eval_shape(lambda: make_trees(0)["params"])
    names = [p.relative_to(original) for p in (original / "2").rglob("*") if p.is_file()]
    names = [name for name in names if name.name not in UNCHECKED]
    assert len(names) > 10
    for name in names:
        shutil.rmtree(tmp_path)
        shutil.copytree(original, tmp_path)
        if (tmp_path / name).stat().st_size == 0:
            continue
        damage(tmp_path / name)
        with pytest.raises(CheckpointError) as caught:
            restore_trees(tmp_path, 2, {"params": like})["params"]
        message = str(caught.value)
        assert f"checkpoint {tmp_path / '2'} is damaged: " in message, name
        assert f"the last good checkpoint is {tmp_path / '1'};" in message, name
        assert "\n" not in message
    assert_same_bits(
        restore_trees(tmp_path, 1, {"params": like})["params"], make_trees(1)["params"]
    )


@pytest.mark.parametrize(
    "name, damage",
    [
        ("metrics/metrics", damage_empty),
        ("params/manifest.ocdbt", damage_half),
        ("params/manifest.ocdbt", damage_bit),
        ("training/_METADATA", os.remove),
        ("files.json", damage_bit),
        ("files.json", os.remove),
    ],
)
def test_a_damaged_checkpoint_is_set_aside(saved, tmp_path, name, damage):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "2" / name)
    before = read_files(tmp_path / "2")
    said = []
    assert set_aside_damaged(tmp_path, said.append) == 1
    [line] = said
    # A flipped bit in the list of files looks like another damage.
    shown = "" if (name, damage) == ("files.json", damage_bit) else f"{name} "
    assert line.startswith(f"checkpoint {tmp_path / '2'} is damaged: {shown}")
    assert f"; using {tmp_path / '1'} instead; it is kept as {tmp_path / '2.damaged'}" in line
    assert saved_steps(tmp_path) == [1] and read_files(tmp_path / "2.damaged") == before
    with open_checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, jax.eval_shape(lambda: make_trees(0)))
        checkpoints.save(2, make_trees(2), cross_entropy=0.5)
    assert_same_bits(restored, make_trees(1))
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "2.damaged"]
    assert best_step(tmp_path) == 2 and find_damage(tmp_path / "2") is None
    # And a second time, with the name taken.
    damage(tmp_path / "2" / name)
    assert set_aside_damaged(tmp_path, said.append) == 1
    assert sorted(os.listdir(tmp_path)) == ["1", "2.damaged", "2.damaged.2"]


def test_what_a_list_of_files_names_is_said_in_one_plain_line(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "2" / "files.json").write_text(r'{"\ud800\u001b[31m\n": [1, 2]}')
    said = []
    assert set_aside_damaged(tmp_path, said.append) == 1
    [line] = said
    assert line.isprintable() and r"\ud800\x1b[31m\n is missing" in line


def test_only_folders_named_as_checkpoints_are_some(tmp_path):
    for name in ("3", "0", "²", "٣", "040", "40.damaged", "-1", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("a file")
    assert saved_steps(tmp_path) == [0, 3]


def test_good_checkpoints_are_left_alone_and_older_ones_not_read(saved, tmp_path):
    assert set_aside_damaged(tmp_path / "none") == 0
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damage_bit(tmp_path / "1" / "params" / "manifest.ocdbt")
    said = []
    assert set_aside_damaged(tmp_path, said.append) == 2 and said == []
    damage_bit(tmp_path / "1" / "metrics" / "metrics")  # which orbax reads when it opens
    assert set_aside_damaged(tmp_path, said.append) == 2
    assert said[0].endswith(f"since it was written; it is kept as {tmp_path / '1.damaged'}")
    assert saved_steps(tmp_path) == [2]


def test_without_a_good_checkpoint_all_stay_and_are_named(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in ("1", "2"):
        damage_empty(tmp_path / step / "params" / "manifest.ocdbt")
    with pytest.raises(CheckpointError) as caught:
        set_aside_damaged(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"every checkpoint in {tmp_path} is damaged (2: params/manifest")
    assert "; 1: params/manifest.ocdbt has 0 of" in message and "\n" not in message
    assert saved_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda p: p["layer"].update(kernel=jnp.zeros((32, 32))),
            r"kernel is float32\[64, 64\], th",
        ),
        (lambda p: p["layer"].update(bias=jnp.zeros(4, jnp.int32)), r"bias is .* int32\[4\]"),
        (lambda p: p.update(more=jnp.zeros(2)), r"params.more is missing"),
        (lambda p: p["layer"].pop("bias"), r"params.layer.bias is .* no such array"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, change, message):
    like = make_trees(0)
    change(like["params"])
    with pytest.raises(CheckpointError, match=f"2 does not fit this model: .*{message}"):
        restore_trees(saved, 2, {"params": like["params"]})
    with open_checkpoints(saved) as checkpoints:
        with pytest.raises(CheckpointError, match=f"2 does not fit this model: .*{message}"):
            checkpoints.restore(2, like)


def test_a_full_disk_leaves_the_checkpoint_before(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)

    def fail(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = open_checkpoints(tmp_path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_manifest", fail)  # the last thing that writes
        checkpoints.save(3, make_trees(3))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.wait()
    assert "3 could not be written: no space left on the device" in str(caught.value)
    assert f"the last good checkpoint is {tmp_path / '2'}" in str(caught.value)
    checkpoints.close()
    assert saved_steps(tmp_path) == [1, 2]
    # The next run clears away what was half-written.
    with open_checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(3, make_trees(3))
    assert os.listdir(tmp_path) == ["3"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


# Orbax closes its event loop on the answers of the other writes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_really_full_disk_leaves_the_checkpoint_before(small_disk):
    with open_checkpoints(small_disk, keep_last=1) as checkpoints:
        checkpoints.save(1, make_trees(1))
    with pytest.raises(CheckpointError, match="2 could not be written: no space left") as caught:
        with open_checkpoints(small_disk, keep_last=1) as checkpoints:
            checkpoints.save(2, make_trees(2, width=400))
            checkpoints.wait()
    assert f"the last good checkpoint is {small_disk / '1'}" in str(caught.value)
    like = jax.eval_shape(lambda: make_trees(0)["params"])
    assert_same_bits(
        restore_trees(small_disk, 1, {"params": like})["params"], make_trees(1)["params"]
    )


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from moe_jax.checkpoints import manager
from test_manager import make_trees, open_checkpoints

def die(directory):
    os.kill(os.getpid(), signal.SIGKILL)

with open_checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, make_trees(1))
    checkpoints.wait()
    manager.write_manifest = die
    checkpoints.save(2, make_trees(2))
"""


def test_what_a_killed_process_left_half_written_is_no_checkpoint(tmp_path):
    here = str(Path(__file__).parent)
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here])
    assert process.returncode == -9
    assert len(os.listdir(tmp_path)) == 2 and saved_steps(tmp_path) == [1]
    with open_checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, jax.eval_shape(lambda: make_trees(0)))
        checkpoints.save(2, make_trees(2))
    assert_same_bits(restored, make_trees(1))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": 3}', '{"a": [1]}', "3", "no JSON"])
def test_a_list_of_files_of_another_shape_is_damage(tmp_path, content):
    (tmp_path / "files.json").write_text(content)
    assert find_damage(tmp_path) == "files.json is damaged"


def expert_trees(mesh):
    """Weights and moments in which expert i is full of i, spread over the mesh."""
    number = jnp.arange(8.0)[:, None, None]
    weight = jnp.broadcast_to(number, (8, 4, 6))
    params = {"experts": {"w_in": weight, "w_out": jnp.swapaxes(weight, 1, 2)}}
    trees = {"params": params, "training": optax.adam(1e-3).init(params)[0]._replace(mu=params)}
    return jax.device_put(trees, shardings_of(trees, mesh))


@pytest.mark.parametrize("saved_on", [2, 8])
def test_experts_come_back_on_another_mesh(tmp_path, saved_on):
    """Every device's experts are saved, with their moments, and go where the new mesh has them."""
    trees = expert_trees(make_mesh(data=1, expert=saved_on))
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, trees)
    for sizes in (dict(data=1), dict(data=1, expert=2), dict(data=2, fsdp=2), dict(expert=8)):
        like = expert_trees(make_mesh(**sizes))
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        with open_checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(1, shapes)
        assert_same_bits(restored, trees)
        for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert got.sharding == wanted.sharding
        for moment in (restored["params"], restored["training"].mu):
            np.testing.assert_array_equal(moment["experts"]["w_in"][:, 0, 0], np.arange(8))
