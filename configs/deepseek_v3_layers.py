"""Four layers of the sizes of DeepSeek-V3 (arXiv:2412.19437), all with experts.

Differences: attention is full multi-head, 56 heads of 128, not latent; the vocabulary is half as
large; the first layers of DeepSeek-V3 are dense. The capacity is what bounds the buffers of the
exchange: without one, a device must have room for all rows of all devices that share its experts.

Command: python -m moe_jax.compile --config configs/deepseek_v3_layers.py --topology v5p:4x4x8
Time:    7 minutes on two cores that had much else to do
Result:  38.7 GB of 102 GB of a device, and a step of 2,097,152 tokens in 0.89 s if everything
         overlaps at the published rates (75% MFU, an estimate)
"""

from ml_collections import ConfigDict

from moe_jax.config import base_config


def get_config() -> ConfigDict:
    """Width 7168, 256 experts of width 2048, eight for each token in four of eight groups."""
    config = base_config()
    config.steps = 100000
    config.evaluate_every_steps = 1000
    config.evaluate_batches = 20
    config.checkpoint_every_steps = 1000

    config.data.tokenizer = "bpe"
    config.data.vocab_size = 65408
    config.data.sequence_length = 4096
    config.data.batch_size = 512

    config.model.width = 7168
    config.model.num_layers = 4
    config.model.num_heads = 56
    config.model.activation = "silu"
    config.model.glu = True
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.scan_layers = True
    config.model.remat = True

    config.moe.num_experts = 256
    config.moe.k = 8
    config.moe.expert_width = 2048
    config.moe.num_shared_experts = 1
    config.moe.capacity_factor = 2.0
    config.moe.capacity_scope = "shard"
    config.router = "sigmoid_top_k"
    config.routers.sigmoid_top_k.num_groups = 8
    config.routers.sigmoid_top_k.top_groups = 4
    config.routers.sigmoid_top_k.scale = 2.5

    config.mesh.fsdp = 4
    config.mesh.expert = 32
    # One sequence of each device at a time.
    config.optimizer.accumulate_steps = 4
    config.optimizer.learning_rate = 2.2e-4
    config.optimizer.warmup_steps = 2000
    return config
