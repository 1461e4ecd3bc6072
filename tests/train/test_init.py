"""A run that starts from some of another run's parameters; no step is made."""

import jax
import numpy as np
import pytest

from moe_jax.checkpoints import saved_steps
from moe_jax.checkpoints.names import arrays_by_name
from moe_jax.train import loop
from moe_jax.train.__main__ import main

pytestmark = pytest.mark.sweep


@pytest.fixture
def first_state(command, monkeypatch):
    """(workdir, *overrides) -> the state that the run starts from, kept as its checkpoint 1."""
    states = []

    def keep(run, state, *_):
        states.append(state)
        run._checkpoints.save(1, loop._trees(state))

    monkeypatch.setattr(loop._Run, "train", keep)

    def start(workdir, *overrides):
        assert main(command(workdir, *overrides)) == 0
        return states[-1]

    return start


def arrays(state):
    return {name: np.asarray(array) for name, array in arrays_by_name(state.params).items()}


@pytest.mark.parametrize("mesh", [(), ("--config.mesh.fsdp=2",)], ids=["one device", "fsdp 2"])
def test_taken_arrays_are_the_others_and_the_rest_is_as_initialised(
    first_state, tmp_path, capsys, mesh
):
    other = arrays(first_state(tmp_path / "other", "--config.seed=7"))
    fresh = first_state(tmp_path / "fresh", *mesh)
    capsys.readouterr()
    rules = ("--config.init.rules=blocks/.*/attention/.*,tokens/.*",)
    source = (f"--config.init.checkpoint={tmp_path / 'other'}",)
    state = first_state(tmp_path / "new", *mesh, *source, *rules)
    found, initial = arrays(state), arrays(fresh)
    taken = {name for name in found if "/attention/" in name or name.startswith("tokens/")}
    assert len(taken) == 5  # query, key, value, out and the embedding
    for name, array in found.items():
        np.testing.assert_array_equal(array, (other if name in taken else initial)[name])
        if name in taken:
            assert not np.array_equal(other[name], initial[name])
    assert f"took 5 of {len(found)} arrays" in capsys.readouterr().out
    rest, expected = (s._replace(params=None) for s in (state, fresh))
    for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(fresh.params), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--config.init.rules=nothing", "rule nothing: takes no array"),
        ("--config.model.scan_layers", "allowed: the same model.scan_layers, or rules"),
        (
            "--config.model.mlp_width=8 --config.moe.expert_width=8",
            "got float32[4, 16, 16]; allowed",
        ),
        ("--config.init.rules=(", "config.init.rules: got (; allowed: a comma-separated list"),
        ("--config.init.checkpoint=nowhere", "nowhere: has no checkpoint"),
    ],
)
def test_what_does_not_fit_is_one_line(first_state, command, tmp_path, capsys, overrides, message):
    first_state(tmp_path / "other")
    capsys.readouterr()
    line = command(tmp_path / "new", f"--config.init.checkpoint={tmp_path / 'other'}")
    assert main([*line, *overrides.split()]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not saved_steps(tmp_path / "new" / "checkpoints")
