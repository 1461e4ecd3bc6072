"""Text data: TFDS builders, tokenizers and grain pipelines."""
