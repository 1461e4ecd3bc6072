"""Eight CPU devices for every test, set before jax is imported."""

import os

import pytest

# Where the compilers for accelerators are installed, jax would look for the accelerators.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """Compiles quickly, and keeps programs for other tests of this process and its subprocesses.

    The numbers are those of any compilation. Memory is not: tests of it do without.
    """
    import jax

    options = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}
    environment = {name.upper(): str(value) for name, value in options.items()}
    environment_before = {name: os.environ.get(name) for name in environment}
    for name, value in options.items():
        jax.config.update(name, value)
    os.environ.update(environment)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    for name, value in environment_before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
