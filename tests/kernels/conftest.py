"""Marks the tests of kernels for accelerators, all of which are interpreted or compiled."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        of_a_kernel = item.path.name.startswith(("test_pallas_tpu", "test_mosaic_gpu"))
        if of_a_kernel and not item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.interpreted)
