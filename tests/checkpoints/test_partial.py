import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checkpoints import CheckpointError, Checkpoints
from moe_jax.checkpoints.names import arrays_by_name
from moe_jax.checkpoints.partial import parse_rules, take_parameters


def make_params(offset, layers="blocks"):
    """Two layers, a head and an embedding, every number another."""
    blocks = {
        f"block_{i}": {
            "attention": {"kernel": jnp.full((2, 3), offset + i)},
            "mlp": jnp.ones(4) * i,
        }
        for i in range(2)
    }
    return {layers: blocks, "embedding": jnp.arange(5.0) + offset, "head": jnp.zeros(3)}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """With the checkpoints 1 and 2 of a run."""
    workdir = tmp_path_factory.mktemp("other run")
    with Checkpoints(workdir / "checkpoints", keep_last=2, keep_best=0) as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step, {"params": make_params(100.0 * step), "training": {"a": step * jnp.ones(2)}}
            )
    return workdir


def take(workdir, rules, params=None):
    params = make_params(0.5) if params is None else params
    taken, line = take_parameters(params, workdir, parse_rules(rules))
    assert jax.tree.structure(taken) == jax.tree.structure(params)
    return {name: np.asarray(x) for name, x in arrays_by_name(taken).items()}, line


def test_what_a_rule_names_is_of_the_last_checkpoint_and_the_rest_as_it_was(workdir):
    fresh = {name: np.asarray(x) for name, x in arrays_by_name(make_params(0.5)).items()}
    other = {name: np.asarray(x) for name, x in arrays_by_name(make_params(200.0)).items()}
    for place in (workdir, workdir / "checkpoints"):
        taken, line = take(place, "blocks/.*/attention/.*, embedding")
        for name, array in taken.items():
            source = other if "attention" in name or name == "embedding" else fresh
            np.testing.assert_array_equal(array, source[name])
        # 2 matrices of 6 numbers and an embedding of 5, of 28 numbers in all.
        assert f"took 3 of 6 arrays, 17 of 28 parameters, from {workdir}" in line
    taken, line = take(workdir, ".*")
    assert line.startswith("took 6 of 6 arrays")
    for name, array in taken.items():
        np.testing.assert_array_equal(array, other[name])


def test_a_replacement_renames_and_the_first_rule_counts(workdir):
    taken, _ = take(workdir, r"blocks/block_1/(.*)->blocks/block_0/\1,embedding")
    assert taken["blocks/block_0/attention/kernel"][0, 0] == 201
    assert taken["blocks/block_1/attention/kernel"][0, 0] == 1.5
    with pytest.raises(CheckpointError, match="rule embedding: takes no array"):
        take(workdir, ".*,embedding")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("attention/.*", "rule attention/.*: takes no array; the checkpoint has blocks/"),
        ("head->tail", "head: the model has no tail"),
        ("head->embedding", r"head: got float32\[3\]; allowed: float32\[5\], as embedding"),
        (r"blocks/.*/mlp->blocks/block_0/mlp", "block_0/mlp and .*block_1/mlp are both to be it"),
    ],
)
def test_what_does_not_fit_is_named(workdir, rules, message):
    with pytest.raises(CheckpointError, match=message):
        take(workdir, rules)


def test_layers_in_another_layout_are_refused(workdir):
    params = make_params(0.5, layers="scanned_blocks")
    with pytest.raises(CheckpointError, match="layers of the checkpoint are one by one, and this"):
        take(workdir, ".*", params)
    taken, _ = take(workdir, "embedding", params)
    assert taken["embedding"][0] == 200


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        take(tmp_path, ".*")


HUGE = ["a{99999999999}", 5000 * "(" + 5000 * ")"]


@pytest.mark.parametrize(
    "text", ["", ",", "(", "a->", "->a", r"a->\1", "a,,b", *HUGE], ids=range(9)
)
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match="is no rule"):
        parse_rules(text)
