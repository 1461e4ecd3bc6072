import pytest

from moe_jax.config import base_config, resolve_runs

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


@pytest.fixture
def tiny():
    """(**{"section.field": value}) -> a validated single-run config of a tiny model."""

    def make(**changes):
        config = base_config()
        config.update(steps=10, router="softmax_top_k")
        config.data.update(sequence_length=8, batch_size=4)
        config.model.update(width=16, num_layers=2, num_heads=2, mlp_width=24)
        config.moe.update(num_experts=4, expert_width=12, implementation="einsum")
        config.optimizer.update(warmup_steps=2)
        config.update_from_flattened_dict(changes)
        [run] = resolve_runs(config).values()
        return run

    return make
