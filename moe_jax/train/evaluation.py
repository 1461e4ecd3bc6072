"""Likelihood and routing over a whole split, the same in training and after it.

Axis legend: B sequences in a batch, S sequence length, L layers with experts, E experts, V
vocabulary.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moe_jax.routing import RoutingStatistics, load_statistics
from moe_jax.train.metrics import perplexity, routing_scalars
from moe_jax.train.step import layer_statistics, token_nll


class Evaluation(NamedTuple):
    """Sums over the evaluated tokens, kept on the host.

    Attributes:
      nll: negative log-likelihood in nats, added up in float64.
      num_tokens: evaluated targets.
      num_bytes: bytes of text that those targets stand for.
      load, dropped: int64[L, E]; None for a dense model, as below.
      router_entropy, router_z, unrouted_fraction: float64[L], means over tokens.
    """

    nll: float
    num_tokens: int
    num_bytes: int
    load: np.ndarray | None
    dropped: np.ndarray | None
    router_entropy: np.ndarray | None
    router_z: np.ndarray | None
    unrouted_fraction: np.ndarray | None

    @property
    def cross_entropy(self) -> float:
        """Nats per token."""
        return self.nll / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, comparable across tokenizers."""
        return self.nll / math.log(2) / self.num_bytes

    @property
    def statistics(self) -> RoutingStatistics | None:
        """Of the routing of all evaluated tokens together, with a leading axis L."""
        if self.load is None:
            return None
        loads = jax.vmap(load_statistics)(jnp.asarray(self.load), jnp.asarray(self.dropped))
        return RoutingStatistics(
            self.load,
            self.dropped,
            *loads,
            router_entropy=self.router_entropy,
            router_z=self.router_z,
            active_experts=np.sum(self.load, axis=-1) / self.num_tokens,
            unrouted_fraction=self.unrouted_fraction,
        )

    def scalars(self) -> dict[str, float]:
        """By name; their number depends on neither L nor E."""
        scalars = {
            "cross_entropy": self.cross_entropy,
            "perplexity": perplexity(self.cross_entropy),
            "bits_per_byte": self.bits_per_byte,
        }
        return scalars if self.load is None else scalars | routing_scalars(self.statistics)


def bytes_per_token(tokenizer) -> np.ndarray:
    """int64[V], the bytes of text that each token stands for."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])


def evaluate_split(
    model: nn.Module,
    variables: dict,
    split,
    *,
    sequence_length: int,
    batch_size: int,
    token_bytes: np.ndarray,
    max_batches: int = 0,
    put: Callable[[dict], dict] = lambda batch: batch,
) -> Evaluation:
    """Evaluates every token of a ``TextSplit`` once, without dropout.

    Without a capacity the result does not depend on ``batch_size``, but for rounding; with one,
    the tokens of a batch compete for places.

    Args:
      model: called as ``LanguageModel``; hashable, since a program is compiled once per model and
        shape, however often this is called.
      variables: of the model, {"params": ..., perhaps "router_state": ...}.
      split: of ``moe_jax.data.load_split``.
      sequence_length, batch_size: of the batches.
      token_bytes: int[V], see ``bytes_per_token``.
      max_batches: stop after so many; 0: never.
      put: brings a batch of the host to the devices.
    """
    from moe_jax.data.pipeline import evaluation_batches

    batches = evaluation_batches(split, sequence_length=sequence_length, batch_size=batch_size)
    if max_batches:
        batches = itertools.islice(batches, max_batches)
    return evaluate_batches(model, variables, batches, token_bytes=token_bytes, put=put)


def evaluate_batches(
    model: nn.Module,
    variables: dict,
    batches: Iterable[dict],
    *,
    token_bytes: np.ndarray,
    put: Callable[[dict], dict] = lambda batch: batch,
) -> Evaluation:
    """``evaluate_split`` of given batches {"tokens": int[B, S+1], "valid": bool[B, S]}.

    Raises:
      ValueError: there is no valid token.
    """
    num_tokens = num_bytes = 0
    sums = []
    for batch in batches:
        targets = np.asarray(batch["tokens"])[:, 1:][np.asarray(batch["valid"])]
        num_tokens += targets.size
        num_bytes += int(token_bytes[targets].sum())
        # Not waited for here, so that the device always has the next batch.
        batch = put(batch)
        sums.append(_batch_sums(model, variables, batch["tokens"], batch["valid"]))
    if not num_tokens:
        raise ValueError("evaluation: got no valid token; allowed: batches with at least one")
    nlls, routings = zip(*jax.device_get(sums), strict=True)
    nll = float(np.sum(np.concatenate(nlls), dtype=np.float64))
    if routings[0] is None:
        return Evaluation(nll, num_tokens, num_bytes, *[None] * 5)
    load, dropped, *means = (np.stack(parts) for parts in zip(*routings, strict=True))
    return Evaluation(
        nll,
        num_tokens,
        num_bytes,
        np.sum(load, axis=0, dtype=np.int64),
        np.sum(dropped, axis=0, dtype=np.int64),
        *(np.sum(mean, axis=0, dtype=np.float64) / num_tokens for mean in means),
    )


@functools.partial(jax.jit, static_argnums=0)
def _batch_sums(model, variables, tokens, valid):
    """nll f32[B] of each sequence; load and dropped i32[L, E], and sums over tokens f32[L]."""
    logits, info = model.apply(variables, tokens[:, :-1], valid=valid, deterministic=True)
    nll = jnp.sum(token_nll(logits, tokens[:, 1:], valid), axis=1)
    if info is None:
        return _whole(model, (nll, None))
    statistics = layer_statistics(info, valid)
    count = jnp.sum(valid)
    sums = (
        statistics.load,
        statistics.dropped,
        statistics.router_entropy * count,
        statistics.router_z * count,
        statistics.unrouted_fraction * count,
    )
    return _whole(model, (nll, sums))


def _whole(model, sums):
    """On a mesh, whole on every device, so that every process can read it."""
    if not model.batch_axes:
        return sums
    return jax.lax.with_sharding_constraint(sums, PartitionSpec())
