"""The comparison of layers compares the same function, and its command runs."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import layers, moe_layer, peers, shapes, timing, torch_setup
from moe_jax import dispatch

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = shapes.Shape("test", 32, 16, 24, 4, 2)
OURS = ["dropless", "sorted, capacity 1.25", "einsum in groups of 8", "dropless SwiGLU"]
with_transformers = pytest.mark.skipif(
    torch_setup.missing() != "", reason=f"not installed: {torch_setup.missing()}"
)


def kept(routing, num_experts, capacity, group):
    """bool[T, K]: first come, first served in each group, one assignment after the other."""
    expert = np.asarray(routing.expert)
    keep = np.zeros(expert.shape, bool)
    for t, slot in np.ndindex(expert.shape):
        if t % group == 0 and slot == 0:
            load = [0] * num_experts
        keep[t, slot] = load[expert[t, slot]] < capacity
        load[expert[t, slot]] += 1
    return keep


def loop(x, router, experts, *, capacity, group):
    """Every token, every choice, one expert after the other."""
    routing = layers.route(x, router, SHAPE.k)
    keep = kept(jax.lax.stop_gradient(routing), SHAPE.experts, capacity, group)
    rows = []
    for t in range(SHAPE.tokens):
        row = jnp.zeros(SHAPE.width)
        for slot in range(SHAPE.k):
            e = int(routing.expert[t, slot])
            hidden = x[t] @ experts["w_in"][e]
            if "w_gate" in experts:
                hidden = jax.nn.silu(x[t] @ experts["w_gate"][e]) * hidden
            else:
                hidden = jax.nn.gelu(hidden)
            row += keep[t, slot] * routing.gate[t, slot] * (hidden @ experts["w_out"][e])
        rows.append(row)
    return jnp.stack(rows), int((~keep).sum())


@pytest.mark.parametrize("routing", shapes.ROUTINGS)
def test_our_contenders_compute_what_a_loop_computes(routing, monkeypatch):
    monkeypatch.setattr(layers, "GROUP", 8)
    inputs = shapes.make_inputs(SHAPE, routing)
    found = layers.contenders(SHAPE, inputs, layers.Timed("float32", backward=False))
    programs = {contender.name: contender.make() for contender in found}
    for name in OURS:
        group = 8 if "groups" in name else SHAPE.tokens
        capacity = SHAPE.tokens
        if "dropless" not in name:
            capacity = dispatch.capacity(group, SHAPE.experts, SHAPE.k, layers.CAPACITY_FACTOR)
        experts = inputs.swiglu if "SwiGLU" in name else inputs.experts
        expected, dropped = loop(
            jnp.asarray(inputs.x), inputs.router, experts, capacity=capacity, group=group
        )
        y, counted = layers.look(programs[name].run())
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4, err_msg=name)
        assert counted == dropped, name


def test_gradients_are_those_of_the_output():
    inputs = shapes.make_inputs(SHAPE, "uniform")
    found = layers.contenders(SHAPE, inputs, layers.Timed("float32", backward=True))
    programs = {contender.name: contender.make() for contender in found}
    arguments = (jnp.asarray(inputs.x), jnp.asarray(inputs.router), inputs.experts)

    def every_expert(x, router, experts):
        routing = layers.route(x, router, SHAPE.k)
        chosen = jax.nn.one_hot(routing.expert, SHAPE.experts)
        gates = jnp.einsum("tk,tke->te", routing.gate, chosen)
        hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, experts["w_in"]))
        return jnp.einsum("te,etf,efd->td", gates, hidden, experts["w_out"])

    _, pull_back = jax.vjp(every_expert, *arguments)
    expected = pull_back(jnp.asarray(inputs.cotangent))
    output = programs["dropless"].run()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        output.gradients,
        expected,
    )
    floor = programs[layers.FLOOR].run()
    assert floor.y.shape == (SHAPE.experts, SHAPE.assignments // SHAPE.experts, SHAPE.width)
    assert all(len(programs[name].run().gradients) == 2 for name in (layers.DENSE, layers.FLOOR))


@with_transformers
@pytest.mark.parametrize("block", peers.BLOCKS)
def test_blocks_of_transformers_compute_our_swiglu_layer(block):
    torch_setup.prepare()
    inputs = shapes.make_inputs(SHAPE, "uniform")
    timed = layers.Timed("float32", backward=True)
    ours = {c.name: c for c in layers.contenders(SHAPE, inputs, timed)}
    expected = ours[layers.SWIGLU_DROPLESS].make().run()
    d_x, d_router, d_experts = expected.gradients
    found = {c.name: c for c in peers.contenders(SHAPE, inputs, timed)}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        contender = found[f"{block} {implementation}"]
        assert contender.same_as == layers.SWIGLU_DROPLESS
        output = contender.make().run()
        np.testing.assert_allclose(layers.look(output)[0], expected.y, rtol=1e-4, atol=1e-5)
        x, router, gate_up, down = (g.float().numpy() for g in output.gradients)
        gate, up = np.split(gate_up, 2, axis=1)
        for theirs, mine in (
            (x, d_x),
            (router, d_router.T),
            (gate, d_experts["w_gate"].swapaxes(1, 2)),
            (up, d_experts["w_in"].swapaxes(1, 2)),
            (down, d_experts["w_out"].swapaxes(1, 2)),
        ):
            np.testing.assert_allclose(theirs, mine, rtol=1e-3, atol=1e-4)


def test_skewed_routing_gives_one_expert_half_of_the_first_choices():
    for shape in (shapes.CPU_SHAPES["a"], dataclasses.replace(SHAPE, experts=64)):
        inputs = shapes.make_inputs(dataclasses.replace(shape, expert_width=8), "skewed")
        first = np.argmax(inputs.x @ inputs.router, axis=1)
        assert np.mean(first == 0) == 0.5


def test_three_matrices_cost_what_two_cost():
    for shape in (*shapes.CPU_SHAPES.values(), *shapes.ACCELERATOR_SHAPES.values()):
        assert shape.swiglu_width % 8 == 0
        assert abs(3 * shape.swiglu_width / (2 * shape.expert_width) - 1) < 0.01


def test_contenders_take_turns_and_one_that_fails_is_named():
    order = []

    def works(name):
        return timing.Program(lambda: order.append(name))

    def fails():
        raise timing.NotMeasured("no room")

    found = [timing.Contender(name, "", lambda name=name: works(name), "") for name in "abc"]
    found.append(timing.Contender("d", "", fails, ""))
    results = timing.interleave(found, rounds=4, budget=10.0)
    assert order[:6] == list("aabbcc")  # the warm-up
    rounds = [order[i : i + 3] for i in range(6, len(order), 3)]
    assert len(rounds) == 4 and all(sorted(turn) == list("abc") for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1
    assert results["d"].skipped == "no room" and not results["d"].seconds


@pytest.mark.parametrize("budget, runs", [(100.0, 9), (5.5, 6), (1.5, 3), (1.0, 1), (0.0, 1)])
def test_who_has_used_the_budget_misses_rounds(monkeypatch, budget, runs):
    monkeypatch.setattr(timing, "_time", lambda program: 1.0)
    found = [timing.Contender("a", "", lambda: timing.Program(lambda: None), "")]
    results = timing.interleave(found, rounds=9, budget=budget)
    assert len(results["a"].seconds) == runs


def test_command_writes_tables_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layers, "GROUP", 64)
    monkeypatch.setattr(torch_setup, "missing", lambda: "torch")
    monkeypatch.setattr(shapes, "growth_shapes", lambda quick: {"tokens": [SHAPE]})
    # Not in this process, which has other tests to run.
    monkeypatch.setattr(moe_layer, "keep_freed_memory", lambda: True)
    arguments = "--quick --dtypes float32 --passes forward --growth --without sorted --output"
    assert moe_layer.main([*arguments.split(), str(tmp_path)]) == 0
    record = json.loads((tmp_path / "machine.json").read_text(encoding="utf-8"))
    assert record["freed_memory_is_kept"]
    assert "not installed: torch" in capsys.readouterr().err
    with (tmp_path / "moe_layer.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["routing"] for row in rows} == set(shapes.ROUTINGS)
    contenders = {row["contender"] for row in rows}
    assert "dropless" in contenders and not any("sorted" in name for name in contenders)
    assert all(row["skipped"] == "" and row["runs"] == "2" for row in rows)
    for row in rows:
        assert float(row["q1_ms"]) <= float(row["median_ms"]) <= float(row["q3_ms"])
        assert float(row["ratio_to_dense"]) > 0 and float(row["compile_s"]) > 0
    dense = [row for row in rows if row["contender"] == "dense"]
    assert len(dense) == 2 and all(float(row["ratio_to_dense"]) == 1 for row in dense)
    text = (tmp_path / "moe_layer.md").read_text(encoding="utf-8")
    assert "| dropless | jax |" in text and "jax 0." in text
    with (tmp_path / "growth.csv").open(encoding="utf-8") as file:
        growth = list(csv.DictReader(file))
    assert {row["tokens"] for row in growth} == {"32"}
    assert all(float(row["temp_mib"]) > 0 for row in growth)
    for name in ("moe_layer_float32.png", "growth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--rounds 0", "argument --rounds: got '0'; allowed: whole numbers >= 1"),
        ("--shapes a,x", "argument --shapes: got 'x'; allowed: a, b, c, d"),
        ("--dtypes int8", "argument --dtypes: got 'int8'; allowed: float32, bfloat16"),
    ],
)
def test_a_mistake_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        moe_layer.main(arguments.split())
    assert message in capsys.readouterr().err


def test_leaving_out_what_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_setup, "missing", lambda: "torch")
    monkeypatch.setattr(moe_layer, "keep_freed_memory", lambda: True)
    with pytest.raises(SystemExit, match="--without: got 'eagre'; allowed: parts of dense"):
        moe_layer.main(["--quick", "--without", "eagre", "--output", str(tmp_path)])


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        moe_layer.main(["--help"])
    assert "python -m benchmarks.moe_layer --shapes" in capsys.readouterr().out
