"""Which backend is chosen, and what is said about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.dispatch import moe
from moe_jax.kernels import api
from moe_jax.routing import softmax_top_k


@pytest.fixture
def on_device(monkeypatch):
    return lambda *device: monkeypatch.setattr(api, "current_device", lambda: device)


@pytest.fixture
def without_tokamax(monkeypatch):
    from moe_jax.kernels import ragged

    monkeypatch.setattr(ragged, "has_tokamax", lambda: False)


def test_explain_names_the_choice_and_why_not_the_others():
    lines = kernels.explain(jnp.bfloat16, (64, 128)).splitlines()
    assert lines[0] == "kernels: xla_cpu on cpu for bfloat16, widths (64, 128)"
    assert len(lines) == 1 + len(kernels.BACKENDS)
    states = {line.split()[0]: line.rpartition(": ")[2] for line in lines[1:]}
    assert states["xla_cpu"] == "chosen"
    assert states["pallas_tpu"] == "is made for tpu, this is cpu"
    assert states["xla_ragged"] == "costs E times the work on cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "chosen"),
    [
        ("cpu", jnp.float32, (3, 5), "xla_cpu"),
        ("tpu TPU v5", jnp.bfloat16, (64, 128), "pallas_tpu"),
        ("tpu TPU v5", jnp.float16, (64, 128), "xla_cpu"),
        ("gpu NVIDIA H100 80GB HBM3", jnp.bfloat16, (64, 128), "mosaic_gpu"),
        ("gpu NVIDIA H100 80GB HBM3", jnp.bfloat16, (64, 100), "xla_cpu"),
        ("gpu NVIDIA H100 80GB HBM3", jnp.float32, (64, 128), "xla_cpu"),
        ("gpu NVIDIA A100-SXM4-40GB", jnp.bfloat16, (64, 128), "xla_cpu"),
        ("something else", jnp.float32, (64, 128), "xla_cpu"),
    ],
)
def test_choice_by_device_and_work(on_device, without_tokamax, device, dtype, widths, chosen):
    platform, _, kind = device.partition(" ")
    on_device(platform, kind)
    if (platform, chosen) == ("tpu", "xla_cpu") and jax.__version_info__ >= (0, 11):
        chosen = "xla_ragged"
    assert kernels.select(dtype, widths).name == chosen


def test_the_default_device_may_be_a_name():
    assert api.current_device() == ("cpu", "cpu")
    with jax.default_device("cpu"):
        assert api.current_device() == ("cpu", "cpu")


def test_refused_backends():
    with pytest.raises(ValueError, match="backend: got 'cuda'; allowed: xla_cpu, pallas_tpu"):
        kernels.select(jnp.float32, (4, 4), "cuda")
    with pytest.raises(ValueError, match="got 'pallas_tpu', which is made for tpu, this is cpu"):
        kernels.select(jnp.float32, (4, 4), "pallas_tpu")


def test_a_named_backend_computes():
    keys = jax.random.split(jax.random.key(0), 4)
    x, router = jax.random.normal(keys[0], (9, 4)), jax.random.normal(keys[1], (4, 3))
    experts = {
        "w_in": jax.random.normal(keys[2], (3, 4, 5)),
        "w_out": jax.random.normal(keys[3], (3, 5, 4)),
    }
    routing = softmax_top_k(x @ router, 2)
    default, _ = moe(x, routing, experts)
    for implementation in ("dropless", "sorted"):
        y, _ = moe(x, routing, experts, implementation=implementation, backend="reference")
        np.testing.assert_allclose(y, default, atol=1e-5)


def test_more_rows_than_an_int32_numbers_are_refused():
    rows = 2**31
    with pytest.raises(ValueError, match=r"rows N: got 2147483648; allowed: less than 2\*\*31"):
        jax.eval_shape(
            kernels.grouped_matmul,
            jax.ShapeDtypeStruct((rows, 8), jnp.float32),
            jax.ShapeDtypeStruct((2, 8, 8), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        )
    # 38000 rows of 8 x 7168 numbers, past 2**31 in all, are numbered by row.
    out = jax.eval_shape(
        kernels.grouped_matmul,
        jax.ShapeDtypeStruct((38000 * 8, 7168), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 7168, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    assert out.shape == (38000 * 8, 8)
