"""A model of the sizes of Mixtral 8x7B (arXiv:2401.04088).

Attention differs: Mixtral has 8 heads of keys and values for its 32 of queries, and this model
has 32 of each, which adds 0.8 billion parameters.

Command: python -m moe_jax.compile --config configs/mixtral_8x7b.py --topology v5p:4x4x4
Time:    6 minutes on two cores that had much else to do
Result:  43.0 GB of 102 GB of a device, and a step of 1,048,576 tokens in 4.2 s if everything
         overlaps at the published rates (75% MFU, an estimate)
"""

from ml_collections import ConfigDict

from moe_jax.config import base_config


def get_config() -> ConfigDict:
    """32 layers of width 4096 with 8 experts each, of which a token visits two."""
    config = base_config()
    config.steps = 100000
    config.evaluate_every_steps = 1000
    config.evaluate_batches = 20
    config.checkpoint_every_steps = 1000

    config.data.tokenizer = "bpe"
    config.data.vocab_size = 32000
    config.data.sequence_length = 4096
    config.data.batch_size = 256

    config.model.width = 4096
    config.model.num_layers = 32
    config.model.num_heads = 32
    config.model.activation = "silu"
    config.model.glu = True
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.scan_layers = True
    config.model.remat = True

    config.moe.num_experts = 8
    config.moe.k = 2
    config.moe.expert_width = 14336
    config.router = "top_k_softmax"

    config.mesh.fsdp = 8
    config.mesh.expert = 8
    # One sequence of each device at a time.
    config.optimizer.accumulate_steps = 4
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    return config
