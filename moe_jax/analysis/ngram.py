"""Unigram and bigram language models: what a trained model has to beat.

Both predict the targets ``tokens[1:]`` of a flat array from the contexts ``tokens[:-1]``, the same
targets that a language model is evaluated on. Natural logarithms throughout.

Axes: N targets, V token ids, P distinct pairs (context, target) in the training tokens.
"""

from typing import NamedTuple

import numpy as np


class Unigram(NamedTuple):
    """Target probabilities that ignore the context.

    Attributes:
      probability: f64[V].
    """

    probability: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self.probability)

    def log_probability(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Log probability of each target, f64[N], for contexts and targets i[N]."""
        del contexts
        return np.log(self.probability[targets])


class Bigram(NamedTuple):
    """Target probabilities given the token before, smoothed.

    ``p(w | c) = max(n(c, w) - discount, 0) / n(c) + backoff(c) continuation(w)``

    Attributes:
      pairs: i64[P], ascending, context * V + target.
      discounted: f64[P], the first term of the formula for each pair.
      backoff: f64[V], the probability taken from the pairs of a context; 1 for unseen contexts.
      continuation: f64[V], distribution of the targets in distinct pairs.
    """

    pairs: np.ndarray
    discounted: np.ndarray
    backoff: np.ndarray
    continuation: np.ndarray

    @property
    def vocab_size(self) -> int:
        return len(self.continuation)

    def log_probability(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Log probability of each target given its context, f64[N], for i[N] each."""
        wanted = _pair(contexts, targets, self.vocab_size)
        place = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == wanted, self.discounted[place], 0.0)
        return np.log(seen + self.backoff[contexts] * self.continuation[targets])


def fit_unigram(tokens: np.ndarray, vocab_size: int) -> Unigram:
    """Counts targets, plus one for each token id so that none is impossible (Laplace).

    Args:
      tokens: i[N+1], flat training tokens.
      vocab_size: V.

    Raises:
      ValueError: fewer than two tokens, or a token outside the vocabulary.
    """
    _, targets = _contexts_and_targets(tokens, vocab_size)
    return Unigram(_add_one(targets, vocab_size))


def fit_bigram(tokens: np.ndarray, vocab_size: int) -> Bigram:
    """Fits interpolated Kneser-Ney smoothing (Kneser & Ney 1995; Chen & Goodman 1999, sec. 2.7).

    The discount is the usual estimate n1 / (n1 + 2 n2) from the numbers of pairs seen once and
    twice. Continuation counts have one added, so that no token is impossible.

    Args:
      tokens: i[N+1], flat training tokens.
      vocab_size: V.

    Raises:
      ValueError: as `fit_unigram`.
    """
    contexts, targets = _contexts_and_targets(tokens, vocab_size)
    pairs, counts = np.unique(_pair(contexts, targets, vocab_size), return_counts=True)
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    # Where no pair is rare the estimate says nothing, and something must be left for unseen pairs.
    discount = once / (once + 2 * twice) if once else 0.5
    pair_context, pair_target = np.divmod(pairs, vocab_size)
    context_total = np.bincount(contexts, minlength=vocab_size)
    distinct = np.bincount(pair_context, minlength=vocab_size)
    return Bigram(
        pairs=pairs,
        discounted=(counts - discount) / context_total[pair_context],
        backoff=np.where(
            context_total > 0, discount * distinct / np.maximum(context_total, 1), 1.0
        ),
        continuation=_add_one(pair_target, vocab_size),
    )


def total_nll(model: Unigram | Bigram, tokens: np.ndarray) -> float:
    """Negative log-likelihood of held-out tokens, the sum over their targets, in nats.

    Args:
      model: a fitted model.
      tokens: i[N+1], flat held-out tokens.

    Raises:
      ValueError: as `fit_unigram`.
    """
    contexts, targets = _contexts_and_targets(tokens, model.vocab_size)
    return float(-model.log_probability(contexts, targets).sum())


def _contexts_and_targets(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"tokens: got shape {tokens.shape}; allowed: one axis of 2 or more")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"tokens: got ids {tokens.min()} to {tokens.max()}; allowed: 0 to {vocab_size - 1}"
        )
    return tokens[:-1], tokens[1:]


def _pair(contexts: np.ndarray, targets: np.ndarray, vocab_size: int) -> np.ndarray:
    # Token ids come as 16-bit integers, in which the product would wrap around.
    return np.asarray(contexts, np.int64) * vocab_size + np.asarray(targets, np.int64)


def _add_one(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    return (np.bincount(ids, minlength=vocab_size) + 1) / (len(ids) + vocab_size)
