import itertools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.data import pipeline
from moe_jax.data.documents import load_documents
from moe_jax.data.pipeline import TextSplit, evaluation_batches, load_split, train_batches
from moe_jax.data.tokenizers import load_tokenizer


def counting_split(num_tokens):
    """Tokens 0, 1, 2, ...: a token says where in the split it stands."""
    return TextSplit(np.arange(num_tokens, dtype=np.uint16), num_tokens, 1)


def window_indices(batches, length):
    """The window index of each row of the batches; the rows must be whole windows."""
    rows = np.concatenate([batch["tokens"] for batch in batches])
    assert np.array_equal(rows, rows[:, :1] + np.arange(length + 1))
    indices, rest = np.divmod(rows[:, 0], length)
    assert not rest.any()
    return indices.tolist()


def take_windows(split, count, *, length, **arguments):
    """Window indices in the order of training, one batch of one window after the other."""
    batches = train_batches(split, sequence_length=length, batch_size=1, **arguments)
    return window_indices(itertools.islice(batches, count), length)


# load_split


def test_split_is_the_documents_between_end_of_text(cache_dir):
    tokenizer = load_tokenizer("byte")
    split = load_split("sotu", "validation", tokenizer, cache_dir)
    texts = list(load_documents("sotu", "validation", cache_dir))
    expected = [tokenizer.end_of_text]
    for text in texts:
        expected += [*text.encode("utf-8"), tokenizer.end_of_text]
    assert split.tokens.tolist() == expected
    assert split.num_documents == len(texts) == 11
    assert split.num_bytes == sum(len(text.encode("utf-8")) for text in texts)
    assert len(split.tokens) == split.num_bytes + 12


def test_split_of_bpe_decodes_to_the_documents(cache_dir):
    tokenizer = load_tokenizer("bpe", "sotu", 512, cache_dir)
    split = load_split("sotu", "test", tokenizer, cache_dir)
    ends = np.flatnonzero(split.tokens == tokenizer.end_of_text)
    assert (ends[0], ends[-1]) == (0, len(split.tokens) - 1)
    texts = [
        tokenizer.decode(split.tokens[start + 1 : stop]) for start, stop in itertools.pairwise(ends)
    ]
    assert texts == list(load_documents("sotu", "test", cache_dir))
    assert split.num_documents == len(texts)
    assert split.num_bytes == sum(len(text.encode("utf-8")) for text in texts)
    assert split.tokens.max() < tokenizer.vocab_size


def test_split_is_tokenised_once_and_memory_mapped(cache_dir, monkeypatch):
    tokenizer = load_tokenizer("byte")
    first = load_split("sotu", "test", tokenizer, cache_dir)
    monkeypatch.setattr(pipeline, "load_documents", None)
    again = load_split("sotu", "test", tokenizer, cache_dir)
    for split in (first, again):
        assert isinstance(split.tokens, np.memmap)
        assert split.tokens.dtype == np.uint16
        assert not split.tokens.flags.writeable
    assert np.array_equal(first.tokens, again.tokens)
    assert first[1:] == again[1:]


@pytest.fixture
def tiny_data(monkeypatch):
    monkeypatch.setattr(pipeline, "load_documents", lambda *_: iter(["a\u20ac", "", "b"]))


def test_an_empty_document_is_two_ends_in_a_row(tiny_data, tmp_path):
    split = load_split("sotu", "train", load_tokenizer("byte"), tmp_path)
    assert split.tokens.tolist() == [256, 97, 0xE2, 0x82, 0xAC, 256, 256, 98, 256]
    assert (split.num_bytes, split.num_documents) == (5, 3)


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:10],
        lambda content: b"\0" * len(content),
        lambda content: content.replace(b"sha256", b"sha257").replace(b"\x61\x00", b"\x62\x00"),
    ],
    ids=["empty", "one byte short", "cut", "zeros", "changed"],
)
def test_damaged_files_are_named(tiny_data, tmp_path, suffix, damage):
    load_split("sotu", "train", load_tokenizer("byte"), tmp_path)
    (path,) = tmp_path.glob(f"tokens/*{suffix}")
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(ValueError, match=r"train-byte\.npy or .*\.json are damaged .*delete both"):
        load_split("sotu", "train", load_tokenizer("byte"), tmp_path)


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_a_missing_file_is_made_again(tiny_data, tmp_path, suffix):
    first = load_split("sotu", "train", load_tokenizer("byte"), tmp_path)
    (path,) = tmp_path.glob(f"tokens/*{suffix}")
    path.unlink()
    again = load_split("sotu", "train", load_tokenizer("byte"), tmp_path)
    assert np.array_equal(first.tokens, again.tokens)


def test_an_interrupted_tokenisation_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_):
        yield "a"
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "load_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_split("sotu", "train", load_tokenizer("byte"), tmp_path)
    assert list(tmp_path.rglob("*.npy")) == list(tmp_path.rglob("*.json")) == []


def test_unknown_names_are_refused(cache_dir):
    with pytest.raises(ValueError, match="dataset: got 'wikitext'; allowed: sotu"):
        load_split("wikitext", "train", load_tokenizer("byte"), cache_dir)
    with pytest.raises(ValueError, match="split: got 'dev'; allowed: .*validation"):
        load_split("sotu", "dev", load_tokenizer("byte"), cache_dir)


# train_batches


def test_batches_have_the_stated_form():
    batches = train_batches(counting_split(1000), sequence_length=7, batch_size=5, seed=0)
    assert isinstance(batches, grain.DatasetIterator)
    batch = next(batches)
    assert list(batch) == ["tokens"]
    assert batch["tokens"].shape == (5, 8)
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].flags.writeable


@pytest.mark.parametrize("num_tokens", [501, 502, 510])
def test_an_epoch_has_every_window_once_and_each_epoch_another_order(num_tokens):
    order = take_windows(counting_split(num_tokens), 150, length=10, seed=0)
    epochs = [order[i : i + 50] for i in (0, 50, 100)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert len({tuple(epoch) for epoch in [*epochs, range(50)]}) == 4


def test_the_order_follows_from_the_seed():
    split = counting_split(501)
    orders = [take_windows(split, 50, length=10, seed=s) for s in (0, 0, 1, 2**32 - 1)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    # The second epoch of one seed is not the first of the next.
    assert take_windows(split, 100, length=10, seed=0)[50:] != orders[2]


@pytest.mark.parametrize("num_readers", [1, 2, 3, 6])
def test_readers_of_some_rows_share_the_order_of_the_run(num_readers):
    """Six windows a batch, of 50 in an epoch: batches reach into the next one."""
    arguments = dict(sequence_length=10, batch_size=6, seed=5)
    split = counting_split(501)
    whole = list(itertools.islice(train_batches(split, **arguments), 20))
    order = window_indices(whole, 10)
    assert sorted(order[:50]) == sorted(order[50:100]) == list(range(50))
    # From batch 7 on, by other readers than before.
    share = 6 // num_readers
    for reader in range(num_readers):
        rows = range(reader * share, (reader + 1) * share)
        mine = train_batches(split, **arguments, start=7, rows=rows)
        got = [batch["tokens"] for batch in itertools.islice(mine, 13)]
        np.testing.assert_array_equal(got, [batch["tokens"][rows] for batch in whole[7:]])


def test_a_late_start_reads_nothing_before_it():
    """A million batches are no work: the order of every epoch is computed and not walked."""
    arguments = dict(sequence_length=10, batch_size=8, seed=3)
    batches = train_batches(counting_split(501), **arguments, start=10**6)
    assert len(set(window_indices([next(batches)], 10))) == 8


def test_one_window_is_enough():
    batches = train_batches(counting_split(5), sequence_length=4, batch_size=1, seed=0)
    assert window_indices(itertools.islice(batches, 3), 4) == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 51}, r"batch_size: got 51, which takes 511 tokens; .* 501, .* 50 windows"),
        ({"sequence_length": 501}, r"takes 502 tokens; the split has 501, enough for 0 windows"),
        ({"batch_size": 0}, r"batch_size: got 0; allowed: 1 or more"),
        ({"sequence_length": 0}, r"sequence_length: got 0; allowed: 1 or more"),
        ({"seed": -1}, r"seed: got -1; allowed: 0 to 4294967295"),
        ({"seed": 2**32}, r"seed: got 4294967296; allowed"),
        ({"start": -1}, r"start: got -1; allowed: 0 or more"),
        ({"rows": [0, 1]}, r"rows: got \[0, 1\]; allowed: 0..0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    arguments = {"sequence_length": 10, "batch_size": 1, "seed": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        train_batches(counting_split(501), **arguments)


# evaluation_batches


def slow_evaluation_batches(tokens, length, batch_size):
    """One token at a time: target n stands in row n // L of all rows, place n % L."""
    num_targets = len(tokens) - 1
    num_batches = -(-num_targets // (length * batch_size))
    for batch in range(num_batches):
        context = np.zeros((batch_size, length), np.int32)
        target = np.zeros((batch_size, length), np.int32)
        valid = np.zeros((batch_size, length), bool)
        for row, place in itertools.product(range(batch_size), range(length)):
            n = (batch * batch_size + row) * length + place
            if n < num_targets:
                context[row, place], target[row, place] = tokens[n], tokens[n + 1]
                valid[row, place] = True
        yield context, target, valid


@settings(deadline=None)
@given(num_tokens=st.integers(1, 60), length=st.integers(1, 12), batch_size=st.integers(1, 5))
def test_evaluation_has_every_target_once(num_tokens, length, batch_size):
    split = TextSplit(np.arange(num_tokens, dtype=np.uint16) + 1000, num_tokens, 1)
    batches = list(evaluation_batches(split, sequence_length=length, batch_size=batch_size))
    expected = list(slow_evaluation_batches(split.tokens, length, batch_size))
    assert len(batches) == len(expected)
    for batch, (context, target, valid) in zip(batches, expected, strict=True):
        assert list(batch) == ["tokens", "valid"]
        assert batch["tokens"].shape == (batch_size, length + 1)
        assert (batch["tokens"].dtype, batch["valid"].dtype) == (np.int32, bool)
        assert np.array_equal(batch["valid"], valid)
        assert np.array_equal(batch["tokens"][:, :-1][valid], context[valid])
        assert np.array_equal(batch["tokens"][:, 1:][valid], target[valid])
        assert not batch["tokens"][:, 1:][~valid].any()
    targets = [b["tokens"][:, 1:][b["valid"]] for b in batches]
    assert np.array_equal(np.concatenate([[], *targets]), split.tokens[1:])


def test_evaluation_of_real_text_counts_every_token(cache_dir):
    split = load_split("sotu", "test", load_tokenizer("byte"), cache_dir)
    shapes, targets = set(), []
    for batch in evaluation_batches(split, sequence_length=100, batch_size=16):
        shapes.add((batch["tokens"].shape, batch["valid"].shape))
        targets.append(batch["tokens"][:, 1:][batch["valid"]])
    assert shapes == {((16, 101), (16, 100))}
    # All bytes of the text and one end of text per document.
    assert len(np.concatenate(targets)) == split.num_bytes + split.num_documents
    assert np.array_equal(np.concatenate(targets), split.tokens[1:])


@pytest.mark.parametrize("field", ["sequence_length", "batch_size"])
def test_evaluation_refuses_bad_sizes_at_once(field):
    arguments = {"sequence_length": 10, "batch_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field}: got 0; allowed: 1 or more"):
        evaluation_batches(counting_split(100), **arguments)
