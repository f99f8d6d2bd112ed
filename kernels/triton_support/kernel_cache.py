"""The folder of compiled kernels, if it is one that may only be read."""

import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def is_writable(folder: Path) -> bool:
    """Whether this process can make files in a folder; tried, as a mount may forbid it to root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def use_writable_cache() -> Path | None:
    """Let Triton compile into a copy of its folder where that can only be read.

    Triton writes what it has not found there, and fails where it cannot.

    Returns:
        The copy; `None` if none was needed.
    """
    import triton

    given = triton.knobs.cache.dir
    if not given or not Path(given).is_dir() or is_writable(Path(given)):
        return None
    copy = Path(tempfile.mkdtemp(prefix="headrace-kernels-"))
    shutil.copytree(given, copy, dirs_exist_ok=True)
    triton.knobs.cache.dir = str(copy)
    logger.info("%s can only be read: compiled kernels are copied to %s", given, copy)
    return copy
