import pytest

from moe_jax.config import ConfigError, base_config, resolve_runs
from moe_jax.train.build import explain_backend


@pytest.mark.parametrize(
    "overrides, line",
    [
        ({}, "kernels: xla_cpu on cpu for float32, widths (128, 512)"),
        ({"backend": "reference"}, "kernels: reference on cpu for float32, widths (128, 512)"),
        ({"implementation": "einsum"}, "kernels: none, the experts are einsums"),
    ],
)
def test_who_computes_is_a_line(overrides, line):
    config = base_config()
    config.moe.update(overrides)
    assert explain_backend(resolve_runs(config)[""]) == line


def test_a_backend_that_cannot_is_refused():
    config = base_config()
    config.moe.backend = "mosaic_gpu"
    with pytest.raises(
        ConfigError, match="config.moe.backend: got 'mosaic_gpu', which is made for"
    ):
        explain_backend(resolve_runs(config)[""])
