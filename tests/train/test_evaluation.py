import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.data.pipeline import TextSplit
from moe_jax.data.tokenizers import load_tokenizer
from moe_jax.train import evaluation
from moe_jax.train.build import make_initial_state, make_model
from moe_jax.train.evaluation import bytes_per_token, evaluate_batches, evaluate_split
from moe_jax.train.metrics import routing_scalars

VOCAB = 11
BYTES = np.arange(VOCAB)  # token i stands for i bytes


@pytest.fixture(scope="module")
def split():
    tokens = np.random.default_rng(0).integers(0, VOCAB, 8 * 5 + 4).astype(np.uint16)
    return TextSplit(tokens, num_bytes=int(BYTES[tokens[1:]].sum()), num_documents=1)


@pytest.fixture
def model_and_variables(tiny):
    config = tiny(**{"model.dropout": 0.5, "model.num_layers": 1})
    model = make_model(config, VOCAB)
    return model, jax.jit(lambda: make_initial_state(config, model).variables)()


def evaluate(model, variables, split, batch_size=3, **changes):
    sizes = dict(sequence_length=8, batch_size=batch_size, token_bytes=BYTES)
    return evaluate_split(model, variables, split, **sizes | changes)


def test_every_token_counts_once(model_and_variables, split):
    model, variables = model_and_variables
    result = evaluate(model, variables, split)
    targets = split.tokens[1:]
    assert result.num_tokens == len(targets) == 43
    assert result.num_bytes == split.num_bytes
    nll = 0.0
    for start in range(0, 43, 8):  # each window by itself, without padding
        window = split.tokens[start : start + 9].astype(np.int32)[None]
        logits, _ = model.apply(variables, window[:, :-1])
        log_probs = jax.nn.log_softmax(logits)[0]
        nll -= sum(float(log_probs[t, window[0, t + 1]]) for t in range(window.shape[1] - 1))
    np.testing.assert_allclose(result.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(result.cross_entropy, nll / 43, rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, nll / np.log(2) / split.num_bytes, rtol=1e-5)
    assert result.load.shape == result.dropped.shape == (1, 4)
    assert result.load.sum() == 43 * 2 and result.dropped.sum() == 0  # k = 2, nobody dropped


def test_the_batch_size_does_not_matter(model_and_variables, split):
    model, variables = model_and_variables
    results = [evaluate(model, variables, split, batch_size=size) for size in (1, 3)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_array_equal(results[0].load, results[1].load)


def test_it_is_deterministic_and_compiled_once(model_and_variables, split):
    model, variables = model_and_variables
    first = evaluate(model, variables, split)
    programs = evaluation._batch_sums._cache_size()
    second = evaluate(model, jax.tree.map(jnp.copy, variables), split)
    assert evaluation._batch_sums._cache_size() == programs
    assert first.nll == second.nll
    np.testing.assert_array_equal(first.router_entropy, second.router_entropy)


def test_the_first_batches_only(model_and_variables, split):
    model, variables = model_and_variables
    result = evaluate(model, variables, split, max_batches=1)
    assert result.num_tokens == 24
    assert result.num_bytes == BYTES[split.tokens[1:25]].sum()


def test_statistics_are_those_of_all_tokens_together(model_and_variables, split):
    model, variables = model_and_variables
    result = evaluate(model, variables, split)
    share = result.load[0] / result.load[0].sum()
    np.testing.assert_allclose(result.statistics.max_share, [share.max()], rtol=1e-6)
    np.testing.assert_allclose(result.statistics.load_cv, [share.std() * 4], rtol=1e-5)
    scalars = result.scalars()
    assert scalars["max_share_max"] == pytest.approx(share.max(), rel=1e-6)
    assert set(scalars) == {"cross_entropy", "perplexity", "bits_per_byte"} | set(
        routing_scalars(result.statistics)
    )
    assert all(type(value) is float for value in scalars.values())


def test_a_dense_model_has_no_routing(tiny, split):
    config = tiny(**{"moe.num_experts": 0, "model.num_layers": 1})
    model = make_model(config, VOCAB)
    variables = jax.jit(lambda: make_initial_state(config, model).variables)()
    result = evaluate(model, variables, split)
    assert result.load is None and result.statistics is None
    assert set(result.scalars()) == {"cross_entropy", "perplexity", "bits_per_byte"}


def test_nothing_to_evaluate_is_an_error(model_and_variables):
    model, variables = model_and_variables
    batch = {"tokens": np.zeros((3, 9), np.int32), "valid": np.zeros((3, 8), bool)}
    for batches in ([], [batch]):
        with pytest.raises(ValueError, match="no valid token"):
            evaluate_batches(model, variables, batches, token_bytes=BYTES)


def test_bytes_per_token_of_a_tokenizer():
    np.testing.assert_array_equal(bytes_per_token(load_tokenizer("byte")), [1] * 256 + [0])
