import jax
import numpy as np
import pytest

from moe_jax.checkpoints import CheckpointError
from moe_jax.checkpoints.names import arrays_by_name, gather, one_by_one, trees_by_name

# 2 groups of 2 layers: a dense one and one with experts.
SCANNED = {
    "params/scanned_blocks/block_0/mlp": np.arange(6.0).reshape(2, 3),
    "params/scanned_blocks/block_1/experts": np.arange(8.0).reshape(2, 4),
    "router_state/scanned_blocks/block_1/bias": np.array([10, 11]),
    "params/embedding": np.ones(5),
}
ONE_BY_ONE = {
    "params/blocks/block_0/mlp": [0, 1, 2],
    "params/blocks/block_2/mlp": [3, 4, 5],
    "params/blocks/block_1/experts": [0, 1, 2, 3],
    "params/blocks/block_3/experts": [4, 5, 6, 7],
    "router_state/blocks/block_1/bias": 10,
    "router_state/blocks/block_3/bias": 11,
    "params/embedding": [1, 1, 1, 1, 1],
}


def shapes(arrays):
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def test_names_and_trees():
    trees = {"params": {"a": {"b": 1}, "c": 2}, "router_state": {}}
    arrays = arrays_by_name(trees)
    assert arrays == {"params/a/b": 1, "params/c": 2}
    assert trees_by_name(arrays) == {"params": trees["params"]}


def test_layer_g_n_plus_i_is_block_i_of_group_g():
    found = one_by_one(SCANNED)
    assert {name: np.asarray(x).tolist() for name, x in found.items()} == ONE_BY_ONE
    assert one_by_one(found) == found  # none is scanned


@pytest.mark.parametrize("layers", [dict, one_by_one])
def test_gather_puts_scanned_layers_together_again(layers):
    file = {name: np.asarray(x) for name, x in layers(SCANNED).items()}
    found = gather(shapes(SCANNED), shapes(file), file.__getitem__)
    assert found.keys() == SCANNED.keys()
    for name, array in SCANNED.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_gather_reads_nothing_that_does_not_fit():
    file = {name: np.asarray(x) for name, x in one_by_one(SCANNED).items()}
    name = "params/blocks/block_3/experts"
    for change, message in (
        ({name: np.zeros(3)}, rf"{name}: got float64\[3\]; allowed: float64\[4\]"),
        ({"params/more": np.zeros(3)}, "the file has what this model has not: params/more"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gather(shapes(SCANNED), shapes(file | change), None)
    del file[name]
    with pytest.raises(CheckpointError, match=f"the file misses {name}"):
        gather(shapes(SCANNED), shapes(file), None)
