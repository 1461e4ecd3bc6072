"""Freed memory is kept by the process, where the C library is glibc."""

import platform
import subprocess
import sys

import pytest

# How many pages are mapped anew when 64 MiB are allocated, written and freed, five times over.
COUNT = """
import resource, sys
import numpy as np
from moe_jax.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    print(keep_freed_memory())
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(how):
    command = [sys.executable, "-c", COUNT, how]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_pages_are_not_mapped_anew():
    (default,) = run("default")
    took_effect, kept = run("keep")
    assert took_effect == "True"
    assert int(kept) < 0.1 * int(default)
