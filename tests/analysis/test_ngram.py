import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.analysis.ngram import fit_bigram, fit_unigram, total_nll
from moe_jax.data.pipeline import TextSplit, evaluation_batches


def slow_bigram(tokens, vocab_size):
    """Interpolated Kneser-Ney from dictionaries: probability(context, target)."""
    pairs = collections.Counter(zip(tokens[:-1], tokens[1:], strict=True))
    totals = collections.Counter(tokens[:-1])
    followers = collections.Counter(context for context, _ in pairs)
    predecessors = collections.Counter(target for _, target in pairs)
    once = sum(n == 1 for n in pairs.values())
    twice = sum(n == 2 for n in pairs.values())
    discount = once / (once + 2 * twice) if once else 0.5

    def probability(context, target):
        continuation = (predecessors[target] + 1) / (len(pairs) + vocab_size)
        if not totals[context]:
            return continuation
        seen = max(pairs[context, target] - discount, 0) / totals[context]
        return seen + discount * followers[context] / totals[context] * continuation

    return probability


def sample(num_tokens, vocab_size, seed=0):
    """Tokens from a random Markov chain in which few successors are likely."""
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.full(vocab_size, 0.1), size=vocab_size)
    tokens = [0]
    for _ in range(num_tokens - 1):
        tokens.append(rng.choice(vocab_size, p=transition[tokens[-1]]))
    return np.array(tokens, np.uint16), transition


def every_pair(vocab_size):
    ids = np.arange(vocab_size)
    return np.repeat(ids, vocab_size), np.tile(ids, vocab_size)


def test_unigram_by_hand():
    # Targets 1 0 1 2 of 4 ids; with one added each: (2, 3, 2, 1) of 8.
    model = fit_unigram(np.array([0, 1, 0, 1, 2]), 4)
    np.testing.assert_allclose(model.probability, np.array([2, 3, 2, 1]) / 8)
    # Targets 1 and 3: -log(3/8) - log(1/8).
    assert total_nll(model, np.array([3, 1, 3])) == pytest.approx(math.log(8 / 3) + math.log(8))


def test_bigram_by_hand():
    # Pairs 01 twice, 10 twice, 02 once: discount 1 / (1 + 2 * 2) = 0.2. Each of the 3 ids ends one
    # of the 3 distinct pairs: continuation (1 + 1) / (3 + 3) = 1/3.
    model = fit_bigram(np.array([0, 1, 0, 1, 0, 2]), 3)
    p = np.exp(model.log_probability(*every_pair(3))).reshape(3, 3)
    # After 0, seen 3 times in 2 kinds: backoff 0.2 * 2 / 3, a third of it to each id.
    rest = 0.2 * 2 / 3 / 3
    np.testing.assert_allclose(p[0], [rest, (2 - 0.2) / 3 + rest, (1 - 0.2) / 3 + rest])
    # After 1, seen twice in 1 kind: backoff 0.2 / 2.
    np.testing.assert_allclose(p[1], [(2 - 0.2) / 2 + 0.1 / 3, 0.1 / 3, 0.1 / 3])
    # 2 is never a context.
    np.testing.assert_allclose(p[2], [1 / 3] * 3)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), min_size=2, max_size=200),
    vocab_size=st.integers(8, 12),
)
def test_bigram_is_the_slow_one_and_a_distribution(tokens, vocab_size):
    contexts, targets = every_pair(vocab_size)
    model = fit_bigram(np.array(tokens), vocab_size)
    p = np.exp(model.log_probability(contexts, targets))
    slow = slow_bigram(tokens, vocab_size)
    expected = [slow(c, t) for c, t in zip(contexts.tolist(), targets.tolist(), strict=True)]
    np.testing.assert_allclose(p, expected, rtol=1e-12)
    assert np.all(p > 0)
    np.testing.assert_allclose(p.reshape(vocab_size, vocab_size).sum(axis=1), 1, rtol=1e-12)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 7), min_size=2, max_size=50), vocab_size=st.integers(8, 12))
def test_unigram_is_a_distribution(tokens, vocab_size):
    model = fit_unigram(np.array(tokens), vocab_size)
    assert np.all(model.probability > 0)
    assert model.probability.sum() == pytest.approx(1, rel=1e-12)


def test_total_is_the_sum_over_targets():
    train, _ = sample(500, 20)
    held_out, _ = sample(100, 20, seed=1)
    slow = slow_bigram(train.tolist(), 20)
    pairs = zip(held_out[:-1].tolist(), held_out[1:].tolist(), strict=True)
    expected = -sum(math.log(slow(context, target)) for context, target in pairs)
    assert total_nll(fit_bigram(train, 20), held_out) == pytest.approx(expected, rel=1e-12)


def test_bigram_approaches_the_source_and_unigram_does_not():
    tokens, transition = sample(40_000, 20)
    train, held_out = tokens[:30_000], tokens[30_000:]
    num_targets = len(held_out) - 1
    best = -np.log(transition[held_out[:-1], held_out[1:]]).sum()
    bigram = total_nll(fit_bigram(train, 20), held_out)
    unigram = total_nll(fit_unigram(train, 20), held_out)
    assert best < bigram < best + 0.02 * num_targets
    assert bigram + 0.5 * num_targets < unigram < num_targets * math.log(20)


def test_sparse_data_does_not_hurt():
    # 2,000 tokens of 500 ids: most held-out pairs are new, the case that smoothing is for.
    rng = np.random.default_rng(0)
    tokens = (500 * rng.beta(0.3, 2, size=3000)).astype(np.uint16)
    unigram = total_nll(fit_unigram(tokens[:2000], 500), tokens[2000:])
    bigram = total_nll(fit_bigram(tokens[:2000], 500), tokens[2000:])
    # The tokens are independent: nothing is to be gained, and little may be lost.
    assert bigram < 1.05 * unigram


def test_sixteen_bit_tokens_do_not_wrap_around():
    tokens = np.array([65534, 1, 65534, 1, 65534, 2], np.uint16)
    slow = slow_bigram(tokens.tolist(), 65535)
    model = fit_bigram(tokens, 65535)
    contexts, targets = np.array([65534, 65534, 1, 7], np.uint16), np.array([1, 3, 65534, 65534])
    expected = [
        math.log(slow(c, t)) for c, t in zip(contexts.tolist(), targets.tolist(), strict=True)
    ]
    np.testing.assert_allclose(model.log_probability(contexts, targets), expected)


@pytest.mark.parametrize("fit", [fit_unigram, fit_bigram])
def test_targets_are_those_of_evaluation_batches(fit):
    tokens, _ = sample(1000, 20)
    model = fit(tokens, 20)
    total = 0.0
    batches = evaluation_batches(TextSplit(tokens, 1000, 1), sequence_length=7, batch_size=3)
    for batch in batches:
        log_p = model.log_probability(batch["tokens"][:, :-1], batch["tokens"][:, 1:])
        total -= log_p[batch["valid"]].sum()
    assert total_nll(model, tokens) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("fit", [fit_unigram, fit_bigram])
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0], r"tokens: got shape \(1,\)"),
        ([[0, 1], [1, 0]], r"tokens: got shape \(2, 2\)"),
        ([0, 3], r"tokens: got ids 0 to 3; allowed: 0 to 2"),
        ([-1, 2], r"tokens: got ids -1 to 2"),
    ],
)
def test_bad_tokens_are_refused(fit, tokens, message):
    with pytest.raises(ValueError, match=message):
        fit(np.array(tokens), 3)
    with pytest.raises(ValueError, match=message):
        total_nll(fit(np.array([0, 1, 2]), 3), np.array(tokens))
