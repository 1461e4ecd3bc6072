"""The models whose train steps are compared.

What makes a model of transformers does not import jax, so that its process is no larger for it.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import torch_setup

_DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo.py"
_NUM_BATCHES = 8

OURS = "moe_jax moe"


class Training(NamedTuple):
    """A model ready to be trained.

    Attributes:
      parameters: how many it has.
      step: takes the next step with tokens int32[B, S+1]; the work may go on after it returns.
      loss: waits for the work and returns the last loss (of the next token alone).
    """

    parameters: int
    step: Callable[[np.ndarray], None]
    loss: Callable[[], float]


class ModelContender(NamedTuple):
    """A model in the comparison.

    Attributes:
      variant: of the demo, "moe" or "dense".
      change: what to do with the config of that variant.
      implementation: of the experts, for a model of transformers; "" for one of ours.
    """

    variant: str
    change: Callable[[Any], Any]
    implementation: str = ""

    def config(self, quick: bool):
        """The config that the model is made from."""
        return self.change(demo_config(self.variant, quick))


def demo_config(variant: str, quick: bool = False):
    """The config of one run of the demo; ``quick`` makes everything small."""
    from moe_jax.config import resolve_runs

    config = runpy.run_path(str(_DEMO))["get_config"](variant)
    config = resolve_runs(config)[variant]
    if quick:
        config.data.vocab_size, config.data.sequence_length, config.data.batch_size = 64, 16, 2
        config.model.width, config.model.num_layers, config.model.num_heads = 32, 2, 2
        config.moe.expert_width = 24
        config.model.mlp_width = 2 * 24 + config.moe.num_experts // 2
    return config


def batches(config) -> list[np.ndarray]:
    """Random tokens int32[B, S+1], the same for every contender."""
    data, generator = config.data, np.random.default_rng(0)
    size = (_NUM_BATCHES, data.batch_size, data.sequence_length + 1)
    return list(generator.integers(0, data.vocab_size, size, np.int32))


def two_thirds(width: int) -> int:
    """The width of three matrices that cost what two of ``width`` do, a multiple of 8."""
    return max(8, 8 * round(2 * width / 3 / 8))


def as_swiglu(config):
    """The config with the feed-forwards and the gates of Mixtral, at equal FLOPs."""
    config.model.glu, config.model.activation = True, "silu"
    config.model.mlp_width = two_thirds(config.model.mlp_width)
    config.moe.expert_width = two_thirds(config.moe.expert_width)
    if config.moe.num_experts:
        config.routers.softmax_top_k.renormalize = True
        config.losses.z = 0.0
    return config


def unchanged(config):
    """The config of the demo as it is."""
    return config


def unrolled(config):
    """The config without the scan over layers."""
    config.model.scan_layers = False
    return config


def our_step(config):
    """Our train step, and what makes its first state, built as the trainer builds them."""
    from moe_jax.train import build
    from moe_jax.train.step import make_train_step

    model = build.make_model(config, config.data.vocab_size)
    step = make_train_step(
        model,
        build.make_optimizer_of(config),
        build.make_schedule(config),
        build.make_weights(config),
        accumulate_steps=config.optimizer.accumulate_steps,
        method=build.make_method(config),
        steps=config.steps,
    )
    return step, lambda: build.make_initial_state(config, model)


def ours(config) -> Training:
    """Our model and train step."""
    import jax

    step, initial_state = our_step(config)
    state = jax.jit(initial_state)()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    now = {"state": state, "metrics": None}

    def take_step(tokens):
        now["state"], now["metrics"] = step(now["state"], {"tokens": tokens})

    def loss():
        jax.block_until_ready(now["state"])
        return float(now["metrics"].cross_entropy)

    return Training(parameters, take_step, loss)


def transformers_model(config, implementation: str):
    """MixtralForCausalLM of the config's sizes, or LlamaForCausalLM for a dense one."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    model, moe = config.model, config.moe
    common = dict(
        vocab_size=config.data.vocab_size,
        hidden_size=model.width,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_heads,
        hidden_act="silu",
        max_position_embeddings=config.data.sequence_length,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    if not moe.num_experts:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=model.mlp_width, **common))
    return MixtralForCausalLM(
        MixtralConfig(
            intermediate_size=moe.expert_width,
            num_local_experts=moe.num_experts,
            num_experts_per_tok=moe.k,
            sliding_window=None,
            experts_implementation=implementation,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
            **common,
        )
    )


def theirs(config, implementation: str = "grouped_mm") -> Training:
    """A model of transformers with torch's own AdamW, fused, and clipping."""
    torch_setup.prepare()
    import torch

    torch.manual_seed(0)
    model = transformers_model(config, implementation)
    model.train()
    optimizer = _adamw(model, config.optimizer)
    now = {}

    def take_step(tokens):
        tokens = torch.from_numpy(tokens).long()
        # The model would shift labels; shift_labels are the targets as they are.
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        output = model(inputs, labels=inputs, shift_labels=targets)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        auxiliary = getattr(output, "aux_loss", None)
        now["loss"] = output.loss.detach()
        if auxiliary is not None:
            now["loss"] -= 0.01 * auxiliary.detach()

    def loss():
        return float(now["loss"])

    return Training(sum(p.numel() for p in model.parameters()), take_step, loss)


def _adamw(model, optimizer):
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=optimizer.learning_rate / optimizer.warmup_steps,
        betas=(optimizer.b1, optimizer.b2),
        fused=True,
    )


CONTENDERS = {
    OURS: ModelContender("moe", unchanged),
    "moe_jax moe, layers unrolled": ModelContender("moe", unrolled),
    "moe_jax moe, SwiGLU": ModelContender("moe", as_swiglu),
    "Mixtral eager": ModelContender("moe", as_swiglu, "eager"),
    "Mixtral grouped_mm": ModelContender("moe", as_swiglu, "grouped_mm"),
    "Mixtral batched_mm": ModelContender("moe", as_swiglu, "batched_mm"),
    "moe_jax dense": ModelContender("dense", unchanged),
    "moe_jax dense, SwiGLU": ModelContender("dense", as_swiglu),
    "Llama dense": ModelContender("dense", as_swiglu, "eager"),
}
