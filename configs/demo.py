"""A small mixture-of-experts language model beside a dense one of equal active FLOPs per token.

Command: make demo, or
  python -m moe_jax.train --config configs/demo.py --workdir runs/demo
  python -m moe_jax.evaluate --workdir runs/demo
Time:    about 7 minutes on 2 CPU cores, evaluation included
Result:  on the test split, perplexity 13.09 (moe) and 14.04 (dense), 1.650 and 1.695 bits per
         byte, with seed 0; bigram 32.07, unigram 196.55
"""

from ml_collections import ConfigDict

from moe_jax.config import base_config


def get_config(arg: str = "") -> ConfigDict:
    """Two runs, "moe" and "dense", which share everything but the feed-forward layers.

    Args:
      arg: the name of one of them, to train it alone (--config configs/demo.py:moe).
    """
    config = base_config()
    config.steps = 1000
    config.evaluate_every_steps = 200
    config.evaluate_batches = 40
    config.checkpoint_every_steps = 200

    # Few tokens are seen, a million: a small vocabulary is learnt in that time.
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 512
    config.data.sequence_length = 128
    config.data.batch_size = 8

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.scan_layers = True  # compiles one layer instead of four

    config.moe.num_experts = 16
    config.moe.k = 2
    config.moe.expert_width = 256
    # What a token costs in an MoE layer: k experts of 4 d f operations, and a router of 2 d E, as
    # much as E/2 more hidden units. A dense layer this wide costs exactly the same.
    config.model.mlp_width = 2 * 256 + 16 // 2
    config.router = "softmax_top_k"

    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 50

    variants = {"moe": {}, "dense": {"moe": {"num_experts": 0}}}
    if arg not in ("", *variants):
        raise ValueError(f"argument: got {arg!r}; allowed: {', '.join(variants)}, or none")
    config.variants = {arg: variants[arg]} if arg else variants
    return config
