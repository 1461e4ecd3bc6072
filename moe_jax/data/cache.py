"""Where prepared data is kept, and how a file gets there in one piece."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_directory(cache_dir: str | os.PathLike | None = None) -> Path:
    """The directory for prepared data; it need not exist yet.

    Args:
      cache_dir: an explicit directory, or None for ``$MOE_JAX_CACHE``, else
        ``$XDG_CACHE_HOME/moe_jax``, else ``~/.cache/moe_jax``.
    """
    if cache_dir:
        return Path(cache_dir).expanduser()
    if explicit := os.environ.get("MOE_JAX_CACHE"):
        return Path(explicit).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "moe_jax"
    return Path.home() / ".cache" / "moe_jax"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that becomes `path` when the block ends without an error.

    Readers see the whole file or none. Concurrent writers don't disturb each other, the last one
    stays. Parent directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are readable by their owner only, and a cache may be shared.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
