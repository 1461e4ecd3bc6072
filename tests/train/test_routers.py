"""Every router of the registry trains the demo by its name, and goes on bit for bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_jax.checkpoints import saved_steps
from moe_jax.routing import ROUTERS, make_router
from moe_jax.train.__main__ import main

DEMO = Path(__file__).parents[2] / "configs" / "demo.py"
TINY = {
    "steps": 4,
    "log_every_steps": 1,
    "evaluate_every_steps": 2,
    "evaluate_batches": 1,
    "checkpoint_every_steps": 2,
    "data.tokenizer": "byte",
    "data.sequence_length": 16,
    "data.batch_size": 4,
    "model.width": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "moe.expert_width": 16,
    "moe.backend": "reference",  # compiles quickly
    "mesh.data": 1,  # of the eight devices of tests
    "optimizer.warmup_steps": 1,
}
# What must have moved after a step, and what a method reports.
STATE = {
    "hash": ("salt",),
    "relu_gate": ("l1_weight",),
    "scheduled_top_k": ("sigma", "temperature", "v"),
    "sigmoid_top_k": ("bias",),
    "smooth_top_k": ("target",),
}
MOVES = {"l1_weight", "sigma", "v", "bias"}
OWN_LOSSES = {
    "noisy_top_k": {"importance", "load"},
    "relu_gate": {"l1"},
    "smooth_top_k": {"boundary"},
    "top_p": {"entropy"},
}


def command(name, workdir, cache, **others):
    fields = TINY | {"router": name, "data.cache_dir": str(cache)} | others
    if make_router(name, k=2).sees_future == "always":
        fields["moe.allow_future_leak"] = "true"
    overrides = [f"--config.{field}={value}" for field, value in fields.items()]
    return ["--config", f"{DEMO}:moe", "--workdir", str(workdir), *overrides]


# Nothing carried, a bias, an adaptive gate: the newest jax has these.
KINDS = ("softmax_top_k", "sigmoid_top_k", "smooth_top_k")
EVERY_ROUTER = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.sweep) for name in sorted(ROUTERS)
]


@pytest.mark.parametrize("name", EVERY_ROUTER)
def test_the_demo_trains_and_goes_on_bit_for_bit(
    name, tmp_path, session_dir, arrays_of, rows_of, assert_same_run
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    cache = session_dir / "cache"
    assert main(command(name, whole, cache)) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "moe" / "checkpoints" / "4")
    assert saved_steps(resumed / "moe" / "checkpoints") == [2]
    assert main(command(name, resumed, cache)) == 0

    assert_same_run(resumed / "moe", whole / "moe", step=4)
    _check_state(name, *(arrays_of(whole / "moe", step) for step in (2, 4)))
    _check_metrics(name, rows_of(whole / "moe"))


def _check_state(name, before, after):
    """What the method carries is in the checkpoint, in float32, and moves when it should."""
    state = {array: value for array, value in after.items() if array.startswith("router_state")}
    assert {array.split("'")[-2] for array in state} == set(STATE.get(name, ()))
    for array, value in state.items():
        part = array.split("'")[-2]
        assert value.dtype == (np.uint32 if part == "salt" else np.float32)
        assert value.shape[0] == 2  # layers
        assert (value != before[array]).any() == (part in MOVES), array


def _check_metrics(name, rows):
    last = [row for row in rows if row["split"] == "train"][-1]
    prefix = "router_loss_"
    own = {key.removeprefix(prefix) for key in last if key.startswith(prefix)}
    assert own == OWN_LOSSES.get(name, set())
    own = sum(last[prefix + key] for key in own)
    defaults = make_router(name, k=2).default_losses
    common = sum(
        weight * last[key] for key, weight in defaults._asdict().items() if weight is not None
    )
    # What is minimised is the cross-entropy and every loss that the method has, once.
    assert last["loss"] == pytest.approx(last["cross_entropy"] + own + common, abs=1e-5)
    assert all(value is not None for row in rows for value in row.values())


@pytest.mark.sweep
def test_evaluation_moves_no_state(tmp_path, session_dir, arrays_of):
    """Validating after every step instead of never gives the same bias, to the bit."""
    runs = []
    for every in (1, 4):
        workdir = tmp_path / str(every)
        fields = {"evaluate_every_steps": every}
        assert main(command("sigmoid_top_k", workdir, session_dir / "cache", **fields)) == 0
        runs.append(arrays_of(workdir / "moe", 4))
    for array in runs[0]:
        np.testing.assert_array_equal(runs[0][array], runs[1][array], err_msg=array)


def test_a_router_that_sees_the_future_is_refused(tmp_path, capsys):
    arguments = command("expert_choice", tmp_path, tmp_path)
    arguments = [a for a in arguments if "allow_future_leak" not in a]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "config.router: got expert_choice" in error and "allow_future_leak=true" in error
