import jax
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.config import base_config, resolve_runs
from moe_jax.routing import default_arguments
from moe_jax.sharding import AXES, MeshError, batch_sharding, make_mesh, shardings_of
from moe_jax.train.build import make_initial_state, make_model


def state_shapes(**changes):
    config = base_config()
    config.model.update(width=16, num_layers=2, num_heads=2, mlp_width=24)
    config.moe.update(num_experts=8, expert_width=12, every=2, num_shared_experts=1)
    config.update_from_flattened_dict(changes)
    [run] = resolve_runs(config).values()
    model = make_model(run, 258)
    return jax.eval_shape(lambda: make_initial_state(run, model))


def specs_by_path(tree, mesh):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings_of(tree, mesh))
    }


def test_sizes():
    assert make_mesh().shape == {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1}
    assert tuple(make_mesh(fsdp=2, tensor=2).shape.items()) == tuple(
        zip(AXES, (2, 2, 1, 2), strict=True)
    )
    assert make_mesh(data=1, expert=4).devices.ravel().tolist() == jax.devices()[:4]
    # Neighbours share what is exchanged most.
    assert make_mesh(data=2, expert=2, tensor=2).devices[0, 0, 0].tolist() == jax.devices()[:2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(expert=3), "expert 3 x tensor 1 = 3 for 8 devices; allowed: .* divides 8"),
        (dict(data=3, expert=4), r"data 3 x .* = 4 = 12 devices; there are 8; allowed: smaller"),
        (dict(fsdp=16), "= 16 for 8 devices"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_where_everything_lies(scan_layers):
    mesh = make_mesh(data=1, fsdp=2, expert=2, tensor=2)
    changes = {"model.scan_layers": scan_layers, "model.use_bias": True, "model.glu": True}
    specs = specs_by_path(state_shapes(**changes), mesh)
    blocks = "params/scanned_blocks" if scan_layers else "params/blocks"
    layers = [None] if scan_layers else []
    moe, dense = f"{blocks}/block_1/feed_forward", f"{blocks}/block_0/feed_forward"
    expected = {
        "params/tokens/embedding": P("tensor", "fsdp"),
        "params/final_norm/scale": P(None),
        f"{blocks}/block_0/attention/query/kernel": P(*layers, "fsdp", "tensor"),
        f"{blocks}/block_0/attention/out/kernel": P(*layers, "tensor", "fsdp"),
        f"{dense}/in/kernel": P(*layers, "fsdp", "tensor"),
        f"{dense}/out/kernel": P(*layers, "tensor", "fsdp"),
        f"{dense}/in/bias": P(*layers, "tensor"),
        f"{moe}/shared/gate/kernel": P(*layers, "fsdp", "tensor"),
        f"{moe}/experts/w_in": P(*layers, "expert", "fsdp", "tensor"),
        f"{moe}/experts/w_out": P(*layers, "expert", "tensor", "fsdp"),
        f"{moe}/experts/b_in": P(*layers, "expert", "tensor"),
        f"{moe}/experts/b_out": P(*layers, "expert", None),
        f"{moe}/router/kernel": P(*layers, None, None),
        "step": P(),
        "key": P(),
    }
    assert {path: specs[path] for path in expected} == expected
    # Moments lie where their parameters do.
    moments = {path: spec for path, spec in specs.items() if "/mu/" in path or "/nu/" in path}
    assert len(moments) == 2 * sum(path.startswith("params/") for path in specs)
    for path, spec in moments.items():
        assert spec == specs["params/" + path.partition("u/")[2]], path


@pytest.mark.parametrize("router", default_arguments())
def test_every_router_has_a_place(router):
    specs = specs_by_path(state_shapes(router=router), make_mesh(expert=2))
    routers = [spec for path, spec in specs.items() if "router" in path.split("/")]
    assert all(set(spec) <= {None} for spec in routers)


def test_a_vocabulary_that_does_not_divide_is_whole():
    tree = {"tokens": {"embedding": jax.ShapeDtypeStruct((257, 16), "float32")}}
    assert specs_by_path(tree, make_mesh(tensor=2, fsdp=2)) == {"tokens/embedding": P(None, "fsdp")}


def test_what_has_no_place():
    mesh = make_mesh(fsdp=8)
    kernel = jax.ShapeDtypeStruct((12, 16), "float32")
    with pytest.raises(MeshError, match=r"mesh.fsdp: got 8, but width of .*query/kernel is 12"):
        shardings_of({"attention": {"query": {"kernel": kernel}}}, mesh)
    with pytest.raises(MeshError, match=r"other/kernel: got an array \[12, 16\]; .* in RULES"):
        shardings_of({"other": {"kernel": kernel}}, mesh)


def test_batches_are_over_all_but_tensor():
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)
