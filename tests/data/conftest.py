import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """A cache that the tests of the session share; tests that damage files use their own."""
    return tmp_path_factory.mktemp("moe_jax_cache")
