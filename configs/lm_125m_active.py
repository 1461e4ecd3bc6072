"""A mixture-of-experts language model with 125 million active parameters.

Command: python -m moe_jax.compile --config configs/lm_125m_active.py --topology v5p:2x2x2
Time:    7 minutes on two cores that had much else to do
Result:  32.3 GB of 102 GB of a device, and a step of 524,288 tokens in 0.16 s if everything
         overlaps at the published rates (75% MFU, an estimate); it has not been trained
"""

from ml_collections import ConfigDict

from moe_jax.config import base_config


def get_config() -> ConfigDict:
    """GPT-2 small with 16 experts per layer, of which a token visits two of half the width."""
    config = base_config()
    config.steps = 20000
    config.evaluate_every_steps = 1000
    config.evaluate_batches = 20
    config.checkpoint_every_steps = 1000

    config.data.tokenizer = "bpe"
    config.data.vocab_size = 50304
    config.data.sequence_length = 1024
    config.data.batch_size = 512

    config.model.width = 768
    config.model.num_layers = 12
    config.model.num_heads = 12
    config.model.dtype = "bfloat16"
    config.model.scan_layers = True
    config.model.remat = True

    config.moe.num_experts = 16
    config.moe.k = 2
    config.moe.expert_width = 1536
    config.router = "softmax_top_k"

    config.mesh.expert = 8
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 500
    return config
