"""The comparison of train steps compares the same model, and its command runs."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models, step_profile, train_step
from benchmarks.torch_setup import missing
from moe_jax.train import build

pytestmark = pytest.mark.usefixtures("quick_compilation")

with_transformers = pytest.mark.skipif(missing() != "", reason=f"not installed: {missing()}")


def copy_into(model, params):
    """Gives a Mixtral or Llama model our parameters of scanned layers."""
    import torch

    def weight(array):
        return torch.nn.Parameter(torch.from_numpy(np.array(array)))

    def matrix(array):
        return weight(np.asarray(array).swapaxes(-1, -2))

    model.model.embed_tokens.weight = weight(params["tokens"]["embedding"])
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight = weight(params["final_norm"]["scale"])
    for i, layer in enumerate(model.model.layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["scanned_blocks"]["block_0"])
        layer.input_layernorm.weight = weight(block["attention_norm"]["scale"])
        layer.post_attention_layernorm.weight = weight(block["feed_forward_norm"]["scale"])
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
        for theirs, mine in names.items():
            getattr(layer.self_attn, theirs).weight = matrix(block["attention"][mine]["kernel"])
        feed_forward = block["feed_forward"]
        if "experts" not in feed_forward:
            for theirs, mine in {"gate_proj": "gate", "up_proj": "in", "down_proj": "out"}.items():
                getattr(layer.mlp, theirs).weight = matrix(feed_forward[mine]["kernel"])
            continue
        experts = feed_forward["experts"]
        layer.mlp.gate.weight = matrix(feed_forward["router"]["kernel"])
        both = np.concatenate([experts["w_gate"], experts["w_in"]], axis=2)
        layer.mlp.experts.gate_up_proj = matrix(both)
        layer.mlp.experts.down_proj = matrix(experts["w_out"])


@with_transformers
@pytest.mark.parametrize("variant", ["moe", "dense"])
def test_model_of_transformers_is_our_model_in_swiglu(variant):
    import torch

    config = models.as_swiglu(models.demo_config(variant, quick=True))
    model = build.make_model(config, config.data.vocab_size)
    params = jax.jit(lambda: build.make_initial_state(config, model).params)()
    theirs = models.transformers_model(config, "grouped_mm")
    assert sum(p.numel() for p in theirs.parameters()) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    copy_into(theirs, params)
    tokens = models.batches(config)[0][:, :-1]
    expected, _ = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens))
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)


def test_command_measures_every_contender(tmp_path, monkeypatch):
    names = [models.OURS]
    if not missing():
        names.append("Mixtral grouped_mm")
    chosen = {name: models.CONTENDERS[name] for name in names}
    monkeypatch.setattr(models, "CONTENDERS", chosen)
    assert train_step.main(["--quick", "--output", str(tmp_path)]) == 0
    with (tmp_path / "train_step.csv").open(encoding="utf-8") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert list(rows) == names
    assert list(next(iter(rows.values()))) == list(train_step.COLUMNS)
    for row in rows.values():
        assert row["skipped"] == "" and 0 < float(row["last_loss"]) < 6  # ln 64 is 4.2
        assert float(row["peak_mib"]) > float(row["growth_mib"]) > 0
        assert float(row["tokens_per_second"]) > 0
    assert float(rows[models.OURS]["speed_ratio"]) == 1


def test_a_worker_that_fails_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def without_layers(config):
        config.model.num_layers = 0
        return config

    impossible = {"impossible": models.ModelContender("dense", without_layers)}
    monkeypatch.setattr(models, "CONTENDERS", impossible)
    assert train_step.main(["--quick", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "train_step.md").read_text(encoding="utf-8")
    assert "| impossible | - |" in text and "Error: " in text


def test_profile_accounts_for_the_whole_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step_profile, "VARIANTS", ("moe",))
    assert train_step.main(["--quick", "--profile", "--output", str(tmp_path)]) == 0
    with (tmp_path / "profile.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts = {row["part"]: float(row["total_ms"]) for row in rows}
    step = parts.pop(step_profile.STEP)
    parts.pop(step_profile.MODEL)
    counted = [ms for name, ms in parts.items() if not name.startswith("- of")]
    assert "MoE layer" in parts and np.isclose(sum(counted), step)
