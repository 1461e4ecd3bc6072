import numpy as np
import pytest

from moe_jax.config import base_config, resolve_runs
from moe_jax.train.__main__ import main
from moe_jax.train.log import read_metrics

CONFIG_FILE = """
from moe_jax.config import base_config

def get_config(kind="moe"):
    config = base_config()
    config.steps = 10
    config.log_every_steps = 2
    config.evaluate_every_steps = 4
    config.evaluate_batches = 2
    config.checkpoint_every_steps = 3
    config.data.sequence_length = 16
    config.data.batch_size = 4
    config.data.cache_dir = {cache_dir!r}
    config.model.width = 16
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.mlp_width = 32
    config.model.dropout = 0.1
    config.moe.num_experts = 4 if kind == "moe" else 0
    config.moe.expert_width = 16
    config.moe.implementation = "einsum"
    config.moe.capacity_factor = 1.0
    config.mesh.data = 1  # of the eight devices of tests
    config.optimizer.warmup_steps = 2
    if kind == "variants":
        config.variants = {{"first": {{}}, "second": {{"seed": 1}}}}
    return config
"""


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module", autouse=True)
def compile_once(quick_compilation):
    """For every test of this folder."""


@pytest.fixture(scope="session")
def config_file(session_dir):
    """A config file of a tiny run on real text; its argument is moe, dense or variants."""
    path = session_dir / "tiny.py"
    path.write_text(CONFIG_FILE.format(cache_dir=str(session_dir / "cache")))
    return path


@pytest.fixture(scope="session")
def command(config_file):
    """(workdir, *overrides, kind=...) -> the arguments of the command for the tiny run."""

    def make(workdir, *overrides, kind="moe"):
        return ["--config", f"{config_file}:{kind}", "--workdir", str(workdir), *overrides]

    return make


@pytest.fixture(scope="module")
def reference(session_dir, command, quick_compilation):
    """The directory of an uninterrupted run of ten steps, which the first module trains."""
    workdir = session_dir / "reference"
    assert main(command(workdir)) == 0
    return workdir


@pytest.fixture
def tiny():
    """(**{"section.field": value}) -> a validated single-run config of a tiny model."""

    def make(**changes):
        config = base_config()
        config.update(steps=10, router="softmax_top_k")
        config.data.update(sequence_length=8, batch_size=4)
        config.model.update(width=16, num_layers=2, num_heads=2, mlp_width=24)
        config.moe.update(num_experts=4, expert_width=12, implementation="einsum")
        config.mesh.update(data=1)  # of the eight devices of tests
        config.optimizer.update(warmup_steps=2)
        config.update_from_flattened_dict(changes)
        [run] = resolve_runs(config).values()
        return run

    return make


@pytest.fixture(scope="session")
def arrays_of():
    """(run, step) -> every array of a checkpoint by name."""
    import jax
    import orbax.checkpoint as ocp

    def read(run, step):
        found, checkpoint = {}, (run / "checkpoints" / str(step)).absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            for name in ("params", "router_state", "training"):
                if not (checkpoint / name).exists():
                    continue  # many routers carry nothing
                tree = checkpointer.restore(checkpoint / name)
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                    found[name + jax.tree_util.keystr(path)] = np.asarray(leaf)
        return found

    return read


@pytest.fixture(scope="session")
def rows_of():
    """(run) -> the rows of metrics, without the numbers that are a matter of time."""
    of_time = ("tokens_per_second", "data_wait_fraction")

    def read(run):
        rows = read_metrics(run)
        return [{k: v for k, v in row.items() if k not in of_time} for row in rows]

    return read


@pytest.fixture(scope="session")
def assert_same_run(arrays_of, rows_of):
    """(run, reference, step) -> asserts that both left the same checkpoint and the same files."""

    def check(run, reference, step):
        arrays, expected = arrays_of(run, step), arrays_of(reference, step)
        assert arrays.keys() == expected.keys() and len(arrays) > 20
        for name in expected:
            assert arrays[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
        assert rows_of(run) == rows_of(reference)
        with np.load(run / "routing.npz") as a, np.load(reference / "routing.npz") as b:
            assert sorted(a) == sorted(b)
            for name in b:
                np.testing.assert_array_equal(a[name], b[name])
        header, *table = (run / "metrics.csv").read_text().splitlines()
        assert len(table) == len(rows_of(reference))

    return check
