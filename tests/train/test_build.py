from types import SimpleNamespace

import jax
import pytest

from moe_jax.config import ConfigError, base_config, resolve_runs
from moe_jax.train.build import _has_ragged_exchange, explain_backend


@pytest.mark.parametrize(
    "overrides, line",
    [
        ({}, "kernels: xla_cpu on cpu for float32, widths (128, 512)"),
        ({"backend": "reference"}, "kernels: reference on cpu for float32, widths (128, 512)"),
        ({"implementation": "einsum"}, "kernels: none, all products are XLA's"),
        (
            {"implementation": "sorted"},
            "kernels: xla_cpu on cpu for float32, widths (128, 512); for the rows, the products are"
            " XLA's",
        ),
    ],
)
def test_who_computes_is_a_line(overrides, line):
    config = base_config()
    config.moe.update(overrides)
    assert explain_backend(resolve_runs(config)[""]) == line


def test_experts_that_choose_ask_no_backend():
    config = base_config()
    config.router, config.moe.allow_future_leak = "expert_choice", True
    line = "kernels: none, all products are XLA's"
    assert explain_backend(resolve_runs(config)[""]) == line


def test_a_backend_that_cannot_is_refused():
    config = base_config()
    config.moe.backend = "mosaic_gpu"
    with pytest.raises(
        ConfigError, match="config.moe.backend: got 'mosaic_gpu', which is made for"
    ):
        explain_backend(resolve_runs(config)[""])


@pytest.mark.parametrize(
    "kind, ragged",
    [("TPU v5 lite", False), ("TPU v5", True), ("TPU v6 lite", True), ("TPU7x", True)],
)
def test_who_sends_the_rows_there_are(kind, ragged):
    assert _has_ragged_exchange(SimpleNamespace(platform="tpu", device_kind=kind)) == ragged
    assert not _has_ragged_exchange(jax.devices("cpu")[0])
