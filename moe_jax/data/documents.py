"""The documents of a text data set, prepared once with TFDS in the cache directory."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from moe_jax.data import sotu
from moe_jax.data.cache import cache_directory

# Builders whose examples have a feature "text" and whose splits are sotu.SPLITS.
DATASETS: dict[str, type[tfds.core.GeneratorBasedBuilder]] = {"sotu": sotu.Sotu}


def dataset_version(dataset: str) -> str:
    """The version of a data set; it changes whenever the text does."""
    return str(_builder_class(dataset).VERSION)


def load_documents(
    dataset: str, split: str, cache_dir: str | os.PathLike | None = None
) -> Iterator[str]:
    """Yields the documents of a split, always in the same order.

    Args:
      dataset: a key of DATASETS.
      split: "train", "validation" or "test".
      cache_dir: see `cache_directory`.

    Raises:
      ValueError: unknown data set or split, or a damaged copy in the cache.
    """
    builder = prepare(dataset, cache_dir)
    if split not in builder.info.splits:
        raise ValueError(f"split: got {split!r}; allowed: {', '.join(builder.info.splits)}")
    source = builder.as_data_source(split)
    return (source[i]["text"].decode("utf-8") for i in range(len(source)))


def prepare(
    dataset: str, cache_dir: str | os.PathLike | None = None
) -> tfds.core.GeneratorBasedBuilder:
    """Builds a data set if the cache lacks it; returns the builder, ready to read from.

    Safe to interrupt and to run in several processes at once: each builds in a directory of its
    own, the first to finish renames its result into place and the others use that.
    """
    builder_class = _builder_class(dataset)
    root = cache_directory(cache_dir) / "tfds"
    final = root / dataset / dataset_version(dataset)
    if not _is_complete(final):
        root.mkdir(parents=True, exist_ok=True)
        # Not TFDS's own temporary directory: its name comes from the `random` module, so that
        # processes with the same seed share it, and losing the race to rename it is an error.
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{dataset}-") as own:
            builder = builder_class(data_dir=own, file_format="array_record")
            # Quiet: TFDS prints, and draws progress bars. Its errors are raised.
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                builder.download_and_prepare()
            final.parent.mkdir(exist_ok=True)
            try:
                os.rename(builder.data_dir, final)
            except OSError as error:
                if not _is_complete(final):
                    raise ValueError(
                        f"The data set in {final} is damaged; delete this directory to rebuild it"
                    ) from error
    return builder_class(data_dir=root, file_format="array_record")


def _builder_class(dataset: str) -> type[tfds.core.GeneratorBasedBuilder]:
    if dataset not in DATASETS:
        raise ValueError(f"dataset: got {dataset!r}; allowed: {', '.join(DATASETS)}")
    return DATASETS[dataset]


def _is_complete(directory: Path) -> bool:
    return (directory / "dataset_info.json").exists()
