"""A small mixture-of-experts language model beside a dense one of equal active FLOPs per token."""

from ml_collections import ConfigDict

from moe_jax.config import base_config


def get_config() -> ConfigDict:
    """Two runs, "moe" and "dense", which share everything but the feed-forward layers."""
    config = base_config()
    config.steps = 1400
    config.log_every_steps = 10
    config.evaluate_every_steps = 200
    config.evaluate_batches = 40
    config.checkpoint_every_steps = 200

    config.data.tokenizer = "bpe"
    config.data.vocab_size = 2048
    config.data.sequence_length = 128
    config.data.batch_size = 16

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4

    config.moe.num_experts = 16
    config.moe.k = 2
    config.moe.expert_width = 256
    # What a token costs in an MoE layer: k experts, and a router of 2 d E operations, which is as
    # much as E/2 more hidden units (4 d operations each). With them both models cost the same.
    config.model.mlp_width = 2 * 256 + 16 // 2
    config.router = "softmax_top_k"

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 100

    config.variants = {"moe": {}, "dense": {"moe": {"num_experts": 0}}}
    return config
