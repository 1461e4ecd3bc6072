"""Hash routing: it follows the token alone, evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.routing import RouterInputs, hash_route, make_router

pytestmark = pytest.mark.usefixtures("quick_compilation")

choose = jax.jit(hash_route, static_argnames=("num_experts", "k"))


def slow_mix(bits):
    """The last step of MurmurHash3 in Python's integers."""
    bits ^= bits >> 16
    bits = bits * 0x85EBCA6B % 2**32
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 % 2**32
    return bits ^ (bits >> 16)


def test_matches_the_loop():
    ids = [0, 1, 2, 50_256, 2**31 - 1]
    expected = []
    for token in ids:
        scores = [slow_mix(slow_mix(token) ^ slow_mix(e)) >> 8 for e in range(8)]
        expected.append(sorted(range(8), key=lambda e: (-scores[e], e))[:3])
    np.testing.assert_array_equal(choose(jnp.array(ids), 8, 3).expert, expected)


def test_follows_the_token_alone():
    ids = jax.random.randint(jax.random.key(0), (200,), 0, 30)
    expert = np.asarray(choose(ids, 8, 2).expert)
    for token in range(30):
        assert len(np.unique(expert[ids == token], axis=0)) == 1


def test_distinct_experts_with_equal_gates():
    routing = choose(jnp.arange(500), 6, 4)
    assert all(len(set(row)) == 4 for row in np.asarray(routing.expert).tolist())
    np.testing.assert_array_equal(routing.gate, 0.25)
    np.testing.assert_array_equal(routing.logits, 0)
    np.testing.assert_allclose(routing.probs, 1 / 6, rtol=1e-6)


def test_all_sets_are_about_equally_likely():
    expert = np.sort(choose(jnp.arange(20_000), 8, 2).expert, axis=1)
    counts = np.bincount(expert.ravel(), minlength=8)
    # Chi-square of 7 degrees of freedom exceeds 24.3 once in a thousand times.
    assert np.sum((counts - 5000) ** 2 / 5000) < 24.3
    pairs = np.bincount(expert[:, 0] * 8 + expert[:, 1], minlength=64)
    pairs = pairs[pairs > 0]
    # 28 pairs of experts, 27 degrees of freedom: 55.5.
    assert len(pairs) == 28
    assert np.sum((pairs - 20_000 / 28) ** 2 / (20_000 / 28)) < 55.5


def test_another_salt_is_another_hash():
    ids = jnp.arange(20_000)
    one = choose(ids, 8).expert
    other = choose(ids, 8, salt=jnp.arange(100, 108, dtype=jnp.uint32)).expert
    # Independent hashes agree for 1 token in 8; the standard deviation is .0023.
    np.testing.assert_allclose(np.mean(np.asarray(one == other)), 1 / 8, atol=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(token_ids=jnp.zeros(3)), r"token_ids: got float32\(3,\); allowed: int\[T\]"),
        (dict(token_ids=jnp.zeros((3, 2), jnp.int32)), r"token_ids: got int32\(3, 2\)"),
        (dict(token_ids=jnp.zeros(3, jnp.int32), k=5), r"k: got 5; allowed: 1\.\.4"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        hash_route(num_experts=4, **arguments)


class TestRouter:
    ROUTER = make_router("hash", k=2)

    def state(self, seed):
        return self.ROUTER.state(jax.random.key(seed), {}, 8)

    def test_what_the_token_looks_like_does_not_matter(self):
        ids = jnp.arange(50)
        x = jax.random.normal(jax.random.key(0), (50, 4))
        route = jax.jit(self.ROUTER.route)
        one = route(RouterInputs(x, token_ids=ids), {}, self.state(1))
        other = route(RouterInputs(-x, token_ids=ids), {}, self.state(1))
        np.testing.assert_array_equal(one.choice.expert, other.choice.expert)

    def test_layers_have_hashes_of_their_own(self):
        inputs = RouterInputs(jnp.zeros((50, 4)), token_ids=jnp.arange(50))
        route = jax.jit(self.ROUTER.route)
        one, other = (route(inputs, {}, self.state(seed)).choice for seed in (1, 2))
        assert (np.asarray(one.expert) != np.asarray(other.expert)).any()

    def test_it_learns_nothing(self):
        assert self.ROUTER.weights(4, 8) == {}

    def test_token_ids_are_needed(self):
        with pytest.raises(ValueError, match="token_ids: got None"):
            self.ROUTER.route(RouterInputs(jnp.zeros((3, 4))), {}, self.state(1))

    def test_says_that_it_cannot_leave_out_experts(self):
        # There are no logits to mask.
        assert not self.ROUTER.can_leave_out_experts
