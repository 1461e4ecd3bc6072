import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax.compiling.collectives import (
    Collective,
    axes_of,
    crosses_nodes,
    find_collectives,
    parse_groups,
    type_bytes,
)

MESH = {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}
ROWS, COLUMNS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]

# As the compiler for TPU writes it: a loop of three rounds around one of unknown length, and a
# fusion that keeps a part of a sum.
LOOPS = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: bf16[16,8]) -> bf16[8,8] {
  %p = bf16[16,8]{1,0} parameter(0)
  %all-reduce.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups=GROUPS, to_apply=%add
  ROOT %part = bf16[8,8]{1,0} dynamic-slice(%all-reduce.2)
}

%inner.cond (s: (s32[], f32[8])) -> pred[] {
  %s.2 = (s32[], f32[8]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %n.2 = s32[] get-tuple-element(%s.2), index=0
  ROOT %lt.2 = pred[] compare(%i.2, %n.2), direction=LT
}

%inner.body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s.3 = (s32[], f32[8]{0}) parameter(0)
  %x.3 = f32[8]{0} get-tuple-element(%s.3), index=1
  %gather = ((f32[8]{0}), f32[32]{0}) all-gather-start(%x.3), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %gathered = f32[32]{0} all-gather-done(%gather)
  ROOT %t.3 = (s32[], f32[8]{0}) tuple(%s.3, %x.3)
}

%cond (s: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT, metadata={op_name="a(b)/c"}
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %x.1 = bf16[16,8]{1,0} get-tuple-element(%s.1), index=1
  %fusion = bf16[8,8]{1,0} fusion(%x.1), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %while.1 = (s32[], f32[8]{0}) while(%s.1), condition=%inner.cond, body=%inner.body
}

ENTRY %main (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]{0}) parameter(0)
  ROOT %while = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body
}
""".replace("GROUPS", "{{0,4},{1,5},{2,6},{3,7}}")


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ROWS),
        ("replica_groups={}, to_apply=%add", [list(range(8))]),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true", COLUMNS),
        # 0..7 as [2,2,2], its first axis last: 0,4 | 1,5 | ... in that order.
        ("replica_groups=[2,4]<=[2,2,2]T(1,2,0)", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'expert'=4] {'expert'}", ROWS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}", [list(range(8))]),
        # The axis of four is two pairs: the outer part, and the inner one.
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Devices 0..7 as [2,2,2] with its first axes swapped: 0 1 4 5 | 2 3 6 7.
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}, dimensions={0}",
            [[0, 1, 4, 5], [2, 3, 6, 7]],
        ),
        ("source_target_pairs={{0,4},{4,0}}", [[0, 4], [4, 0]]),
        ("replica_groups=<something new>", None),
        ("to_apply=%add", None),
    ],
)
def test_groups_in_all_forms(text, groups):
    assert parse_groups(text, num_devices=8) == groups


def test_the_axes_of_groups():
    assert axes_of(ROWS, MESH) == ("expert",)
    assert axes_of(COLUMNS, MESH) == ("fsdp",)
    assert axes_of([list(range(8))], MESH) == ("fsdp", "expert")
    assert axes_of([[0, 0], [1, 5]], MESH) == ("fsdp",)  # a permute, in which 0 keeps its own
    assert axes_of([[3], [4]], MESH) == ()
    assert axes_of(None, MESH) == ("unknown",)


def test_groups_on_several_nodes():
    assert not crosses_nodes(ROWS, 4)
    assert crosses_nodes(COLUMNS, 4)
    assert not crosses_nodes(COLUMNS, 8)


def test_bytes_of_types():
    assert type_bytes("bf16[2,8]{1,0:T(8,128)(2,1)}") == 32
    assert type_bytes("(f32[], s32[3]{0}, /*index=5*/pred[5]{0}, u32[]{:S(2)})") == 4 + 12 + 5 + 4
    assert type_bytes("f8e4m3fn[10]{0}") == 10
    assert type_bytes("token[]") == 0


def test_loops_multiply_and_unknown_ones_are_said():
    scatter, gather = find_collectives(LOOPS)
    # [16, 8] bf16 is 256 bytes, half of which goes to the other of a group.
    assert scatter == Collective("reduce-scatter", 128, COLUMNS, times=3, certain=True)
    # 32 floats are 128 bytes, three quarters of which are sent by somebody to everybody.
    assert gather == Collective("all-gather", 96, ROWS, times=3, certain=False)


def test_a_round_count_that_the_compiler_wrote_down():
    known = 'body=%inner.body, backend_config={"known_trip_count":{"n":"5"}}'
    scatter, gather = find_collectives(LOOPS.replace("body=%inner.body", known))
    assert (scatter.times, gather.times, gather.certain) == (3, 15, True)


def test_a_ragged_exchange_counts_the_rows_there_are():
    text = """\
HloModule m, num_partitions=8

ENTRY %main (x: bf16[512,256]) -> bf16[2048,256] {
  %x = bf16[512,256]{1,0} parameter(0)
  %out = bf16[2048,256]{1,0} parameter(1)
  ROOT %r = bf16[2048,256]{1,0} ragged-all-to-all(%x, %out), replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""
    [exchange] = find_collectives(text)
    # 512 rows of 512 bytes, a quarter of which stay where they are.
    assert exchange.bytes_sent == 512 * 512 * 3 / 4


def test_a_real_program_on_eight_devices():
    mesh = jax.make_mesh((2, 4), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("fsdp", "expert"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def exchange(x):
        def layer(x, _):
            x = jax.lax.all_to_all(x, "expert", 1, 0, tiled=True)  # [1, 64] to [4, 16]
            x = jax.lax.all_to_all(x, "expert", 0, 1, tiled=True)
            return jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]), None

        x, _ = jax.lax.scan(layer, x, length=3)
        whole = jax.lax.all_gather(x, "fsdp")  # [2, 1, 64]
        return x + jnp.cos(whole[0] * whole[1]) + jax.lax.psum(x, ("fsdp", "expert"))

    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(exchange).lower(x).compile().as_text()
    sent = {}
    for c in find_collectives(text):
        assert c.certain
        key = c.kind, axes_of(c.groups, mesh.shape)
        sent[key] = sent.get(key, 0) + c.bytes_sent * c.times
    assert sent == {
        # 256 bytes, of which three quarters leave; two in each of three rounds.
        ("all-to-all", ("expert",)): 192 * 2 * 3,
        ("collective-permute", ("fsdp",)): 256 * 3,
        # The result is 512 bytes, half of which are those of the other.
        ("all-gather", ("fsdp",)): 256,
        # 256 bytes to all eight: 2 * 7/8 of them.
        ("all-reduce", ("fsdp", "expert")): 256 * 2 * 7 / 8,
    }
