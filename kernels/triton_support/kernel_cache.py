"""The folder of compiled kernels, if it is one that may only be read."""

import contextlib
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

    Triton writes what it has not found there, and fails where it cannot. A folder that does not
    exist is made, as Triton would; where that fails, an empty one takes its place.

    Returns:
        The copy; `None` if none was needed.
    """
    import triton

    given = triton.knobs.cache.dir
    if not given:
        return None
    with contextlib.suppress(OSError):
        Path(given).mkdir(parents=True, exist_ok=True)
    if is_writable(Path(given)):
        return None
    copy = Path(tempfile.mkdtemp(prefix="headrace-kernels-"))
    if Path(given).is_dir():
        shutil.copytree(given, copy, dirs_exist_ok=True)
    triton.knobs.cache.dir = str(copy)
    logger.info("%s cannot be written: compiled kernels are in %s", given, copy)
    return copy
