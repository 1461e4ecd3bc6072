"""Tokenizers between text and token ids: bytes, and byte-level byte-pair encoding (BPE)."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from moe_jax.data.cache import atomic_write, cache_directory
from moe_jax.data.documents import dataset_version, load_documents
from moe_jax.untrusted import parse_json

# Token ids are stored as 16-bit integers, see pipeline.py.
MAX_VOCAB_SIZE = 65535


class Tokenizer(Protocol):
    """Text to token ids and back, without loss.

    The last id, `end_of_text`, belongs to no text: `encode` never returns it, whatever the text
    looks like. It separates documents.

    Attributes:
      name: identifies the tokenizer among all others, usable in a file name.
      vocab_size: number of token ids, end_of_text included.
      end_of_text: vocab_size - 1.
    """

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, i32[n]. UnicodeEncodeError: it has an unpaired surrogate."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids.

        end_of_text stands for no text; bytes that are no UTF-8, as a cut in the middle of a
        character leaves them, become U+FFFD. ValueError: an id is outside the vocabulary.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for end_of_text. ValueError: as in `decode`."""


def load_tokenizer(
    kind: str,
    dataset: str = "sotu",
    vocab_size: int | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Tokenizer:
    """Returns a tokenizer; BPE is trained on first use and kept in the cache directory.

    Args:
      kind: "byte" (257 ids, nothing to train) or "bpe" (trained on the train split alone).
      dataset: the data set that BPE is trained on.
      vocab_size: number of token ids including end_of_text. BPE needs it, 257 (bytes) to 65535;
        the byte tokenizer has 257.
      cache_dir: see `cache_directory`.

    Raises:
      ValueError: an argument that is not allowed, or a damaged file in the cache.
    """
    if kind == "byte":
        if vocab_size not in (None, ByteTokenizer.vocab_size):
            raise ValueError(
                f"vocab_size: got {vocab_size}; allowed: {ByteTokenizer.vocab_size} "
                "(256 bytes and end_of_text) for the byte tokenizer"
            )
        return ByteTokenizer()
    if kind != "bpe":
        raise ValueError(f"tokenizer: got {kind!r}; allowed: byte, bpe")
    if vocab_size is None or not 257 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size: got {vocab_size}; allowed: 257 (256 bytes and end_of_text) to "
            f"{MAX_VOCAB_SIZE} for the bpe tokenizer"
        )
    file = f"{dataset}-{dataset_version(dataset)}-bpe-{vocab_size}.json"
    path = cache_directory(cache_dir) / "tokenizers" / file
    if not path.exists():
        documents = load_documents(dataset, "train", cache_dir)
        model = _train_bpe(documents, vocab_size - 1)
        if model.get_vocab_size() < vocab_size - 1:
            raise ValueError(
                f"vocab_size: got {vocab_size}; allowed: up to {model.get_vocab_size() + 1}, all "
                f"that the train split of {dataset} has pairs to merge for"
            )
        # Training is deterministic: of two processes that do it at once, both write the same.
        _write_bpe(path, model)
    model = _read_bpe(path)
    if model.get_vocab_size() != vocab_size - 1:
        raise ValueError(
            f"The tokenizer in {path} is damaged (it has {model.get_vocab_size()} tokens); delete"
            " this file to train it again"
        )
    return BpeTokenizer(model, name=f"bpe-{vocab_size}")


class ByteTokenizer:
    """One token per UTF-8 byte; see `Tokenizer`."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        _check_id(token_id, self.vocab_size)
        return b"" if token_id == self.end_of_text else bytes([token_id])


class BpeTokenizer:
    """Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2); see `Tokenizer`.

    Args:
      model: ids 0 to n-1, without special tokens; vocab_size is n + 1.
      name: a prefix of the attribute `name`, which adds a digest of the model.
    """

    def __init__(self, model: tokenizers.Tokenizer, name: str):
        self._model = model
        size = model.get_vocab_size()
        byte_of = _byte_symbols()
        self._bytes = [bytes(byte_of[s] for s in model.id_to_token(i)) for i in range(size)] + [b""]
        self.vocab_size = size + 1
        self.end_of_text = size
        self.name = f"{name}-{_digest(model.to_str())[:16]}"

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # raises for what is no Unicode text
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        _check_id(token_id, self.vocab_size)
        return self._bytes[token_id]


def _check_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"token id: got {token_id}; allowed: 0 to {vocab_size - 1}")


def _train_bpe(documents: Iterable[str], num_ids: int) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = _pre_tokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=num_ids,
        initial_alphabet=sorted(_byte_symbols()),
        show_progress=False,
    )
    model.train_from_iterator(documents, trainer)
    return model


def _write_bpe(path: Path, model: tokenizers.Tokenizer) -> None:
    content = model.to_str()
    with atomic_write(path) as out:
        out.write(json.dumps({"sha256": _digest(content), "model": content}).encode("utf-8"))


def _read_bpe(path: Path) -> tokenizers.Tokenizer:
    try:
        fields = parse_json(path.read_bytes())
        content = fields["model"]
        if _digest(content) != fields["sha256"]:
            raise ValueError("the checksum differs")
        model = parse_json(content)["model"]
        return _make_bpe(model["vocab"], [(left, right) for left, right in model["merges"]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The tokenizer in {path} is damaged ({error}); delete this file to train it again"
        ) from error


def _make_bpe(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """The model of these tokens. They are checked, since the library panics on some others."""
    symbols = _byte_symbols()
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("the ids are not 0 to n-1")
    if any(not token or set(token) - set(symbols) for token in vocab) or set(symbols) - set(vocab):
        raise ValueError("the tokens are not the bytes and pairs of tokens")
    if any(token not in vocab for merge in merges for token in (*merge, "".join(merge))):
        raise ValueError("a merge is not of tokens")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    model.pre_tokenizer = _pre_tokenizer()
    return model


def _pre_tokenizer():
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _byte_symbols() -> dict[str, int]:
    """The 256 characters that byte-level BPE writes bytes as, with the byte of each.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from 256 on.
    """
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(symbol) for symbol in symbols if ord(symbol) < 256]
    rest = sorted(set(range(256)) - set(printable))
    return dict(zip(symbols, printable + rest, strict=True))
