"""From the documents of a split to batches of token windows.

A split is one flat array of token ids, ``eot doc eot doc ... eot`` (eot: end_of_text): every token
of the text has a predecessor and the end of every document is predicted too. Window i of length L
is ``flat[i*L : i*L+L+1]``, inputs and targets in one, so that a token is a target exactly once.

Axes: B windows in a batch, L sequence length.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from moe_jax.data.cache import atomic_write, cache_directory
from moe_jax.data.documents import dataset_version, load_documents
from moe_jax.data.tokenizers import Tokenizer
from moe_jax.untrusted import load_npy, parse_json


class TextSplit(NamedTuple):
    """The tokens of a split.

    Attributes:
      tokens: u16[N], ``eot doc eot doc ... eot``, memory mapped and read-only.
      num_bytes: UTF-8 bytes of the text, the divisor of bits per byte.
      num_documents: number of documents; N is all text tokens + num_documents + 1.
    """

    tokens: np.ndarray
    num_bytes: int
    num_documents: int


def load_split(
    dataset: str, split: str, tokenizer: Tokenizer, cache_dir: str | os.PathLike | None = None
) -> TextSplit:
    """Returns the tokens of a split, tokenised on first use and kept in the cache directory.

    Args:
      dataset: name of a text data set, see documents.py.
      split: "train", "validation" or "test".
      tokenizer: its `name` is part of the cache's file name.
      cache_dir: see `cache_directory`.

    Raises:
      ValueError: unknown data set or split, or a damaged file in the cache.
    """
    name = f"{dataset}-{dataset_version(dataset)}-{split}-{tokenizer.name}"
    tokens_path = cache_directory(cache_dir) / "tokens" / f"{name}.npy"
    summary_path = tokens_path.with_suffix(".json")
    # The summary is written last: where it is, the tokens are complete.
    if not (tokens_path.exists() and summary_path.exists()):
        flat, summary = _tokenise(load_documents(dataset, split, cache_dir), tokenizer)
        with atomic_write(tokens_path) as out:
            np.save(out, flat)
        with atomic_write(summary_path) as out:
            out.write(json.dumps(summary).encode("utf-8"))
    return _read(tokens_path, summary_path, tokenizer.vocab_size)


def train_batches(
    split: TextSplit,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    start: int = 0,
    rows: Sequence[int] | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of windows, in another order every epoch.

    The order is one of the whole run: which windows make batch number n depends on the seed and the
    batch size alone. A run that goes on from batch ``start``, on however many processes each of
    which reads some ``rows`` of every batch, sees what an undisturbed run on one process sees.
    The last tokens, fewer than a window, are left out; a batch may reach into the next epoch.

    Args:
      split: tokens to cut into windows.
      sequence_length: L, at least 1.
      batch_size: B, windows per batch, over all processes.
      seed: 0 to 2**32 - 1, of the order of the windows.
      start: number of the first batch.
      rows: which windows of every batch this process reads, each in 0..B-1; None: all.

    Returns:
      An iterator of ``{"tokens": i32[len(rows), L+1]}``. It reads ahead in threads, and raises a
      ValueError once the file of the tokens has been cut.

    Raises:
      ValueError: an argument that is not allowed, or too few tokens for one batch.
    """
    _check_sizes(sequence_length, batch_size)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}; allowed: 0 to {2**32 - 1}")
    if start < 0:
        raise ValueError(f"start: got {start}; allowed: 0 or more")
    rows = range(batch_size) if rows is None else list(rows)
    if not all(0 <= row < batch_size for row in rows):
        raise ValueError(f"rows: got {list(rows)}; allowed: 0..{batch_size - 1}")
    windows = _Windows(split.tokens, sequence_length)
    if len(windows) < batch_size:
        raise ValueError(
            f"batch_size: got {batch_size}, which takes {batch_size * sequence_length + 1} tokens;"
            f" the split has {len(split.tokens)}, enough for {len(windows)} windows of"
            f" sequence_length {sequence_length}"
        )
    ordered = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    return iter(
        grain.MapDataset.source(_Batches(ordered, batch_size, rows, start))
        # The default reads 500 batches ahead with 16 threads: memory for nothing, as a batch is
        # a copy of a few rows.
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    )


def evaluation_batches(
    split: TextSplit, *, sequence_length: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches in which every token after the first is a target exactly once, in order.

    Args:
      split: tokens to cut into windows.
      sequence_length: L, at least 1.
      batch_size: B, at least 1.

    Returns:
      An iterator of ``{"tokens": i32[B, L+1], "valid": bool[B, L]}``. ``valid[b, t]`` says whether
      target ``tokens[b, t+1]`` counts; it is False where the last window or batch is filled up
      with zeros.

    Raises:
      ValueError: a size below 1.
    """
    _check_sizes(sequence_length, batch_size)
    return _evaluation_batches(split.tokens, sequence_length, batch_size)


def _evaluation_batches(
    flat: np.ndarray, length: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    num_targets = len(flat) - 1
    span = batch_size * length
    for start in range(0, num_targets, span):
        # Consecutive windows of a batch overlap by one token: rows of inputs, rows of targets.
        piece = np.zeros(span + 1, np.int32)
        available = flat[start : start + span + 1]
        piece[: len(available)] = available
        rows = np.lib.stride_tricks.sliding_window_view(piece, length + 1)[::length]
        valid = np.arange(start, start + span) < num_targets
        yield {"tokens": rows.copy(), "valid": valid.reshape(batch_size, length)}


class _Windows:
    """The whole windows of a flat array, as a source for grain.

    Raises ValueError where the file of a memory-mapped array has been cut since: to touch a page
    beyond its end would kill the process (SIGBUS).
    """

    def __init__(self, flat: np.ndarray, length: int):
        self._flat = flat
        self._length = length
        self._file = None
        if isinstance(flat, np.memmap):
            self._file = open(flat.filename, "rb")  # the one that is mapped, whatever its name is
            weakref.finalize(self, self._file.close)
            self._size = os.fstat(self._file.fileno()).st_size

    def __len__(self) -> int:
        return (len(self._flat) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self._file is not None:
            size = os.fstat(self._file.fileno()).st_size
            if size < self._size:
                raise ValueError(f"{self._flat.filename} has {size} of {self._size} bytes")
        start = index * self._length
        return {"tokens": self._flat[start : start + self._length + 1].astype(np.int32)}


class _Batches:
    """Some rows of every batch of an endless data set, as a source for grain."""

    def __init__(self, windows: grain.MapDataset, batch_size: int, rows: Sequence[int], start: int):
        self._windows = windows
        self._batch_size = batch_size
        self._rows = rows
        self._start = start

    def __len__(self) -> int:
        return len(self._windows) // self._batch_size - self._start

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = (self._start + index) * self._batch_size
        windows = [self._windows[first + row]["tokens"] for row in self._rows]
        return {"tokens": np.stack(windows)}


def _check_sizes(sequence_length: int, batch_size: int) -> None:
    for field, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{field}: got {value}; allowed: 1 or more")


def _tokenise(
    documents: Iterator[str], tokenizer: Tokenizer
) -> tuple[np.ndarray, dict[str, int | str]]:
    end_of_text = np.array([tokenizer.end_of_text], np.uint16)
    pieces = [end_of_text]
    num_bytes = 0
    for text in documents:
        pieces += [tokenizer.encode(text).astype(np.uint16), end_of_text]
        num_bytes += len(text.encode("utf-8"))
    flat = np.concatenate(pieces)
    return flat, {
        "num_tokens": len(flat),
        "num_bytes": num_bytes,
        "num_documents": len(pieces) // 2,
        "sha256": hashlib.sha256(flat.tobytes()).hexdigest(),
    }


def _read(tokens_path: Path, summary_path: Path, vocab_size: int) -> TextSplit:
    try:
        summary = parse_json(summary_path.read_bytes())
        flat = load_npy(tokens_path)
        if flat.dtype != np.uint16 or flat.ndim != 1:
            raise ValueError(f"got {flat.dtype}{list(flat.shape)}; allowed: uint16[N]")
        if hashlib.sha256(flat).hexdigest() != summary["sha256"]:
            raise ValueError("the checksum of the tokens differs")
        if not len(flat) or np.max(flat) >= vocab_size:
            raise ValueError(f"the tokens are not those of a vocabulary of {vocab_size}")
        counts = summary["num_bytes"], summary["num_documents"]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"got the counts {counts}; allowed: whole numbers >= 0")
        return TextSplit(flat, *counts)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"The tokens in {tokens_path} or their summary {summary_path.name} are damaged "
            f"({error}); delete both files to tokenise again"
        ) from error
