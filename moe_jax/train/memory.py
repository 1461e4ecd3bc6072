"""Keeps the pages of freed memory, so that a training step does not ask the kernel for them anew.

XLA on CPU allocates the buffers of every execution with malloc. glibc maps a large one from fresh
pages and returns them when it is freed, and so every step pays a page fault for every 4 KiB that it
touches: a quarter of the time of a small model. Memory is kept up to the peak, as it is needed at
the peak of the next step anyhow.
"""

import ctypes
import sys

# Parameters of mallopt(3), by their numbers in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed, for this process; elsewhere nothing happens.

    To be called before large arrays are made. The environment variable GLIBC_TUNABLES does the
    same from outside, and is left to speak for itself where it sets malloc.

    Returns:
      Whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena, that of brk: the others are limited to 64 MB and map what is larger.
    settings = {
        _MMAP_MAX: 0,
        _TRIM_THRESHOLD: _LARGEST_INT,
        _TOP_PAD: 64 * 2**20,
        _ARENA_MAX: 1,
    }
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
