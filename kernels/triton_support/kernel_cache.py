"""Replaces Triton's folder of compiled kernels by a copy if the folder cannot be written."""

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def is_writable(folder: Path) -> bool:
    """Whether this process can make files in a folder; it tries, as mounts may forbid root, too."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def use_writable_cache() -> Path | None:
    """Let Triton compile into a copy of its folder if the folder cannot be written.

    Triton compiles kernels that it does not find in its folder, and fails if it cannot write them
    there. A folder that does not exist is made first, as by Triton. If that fails, an empty folder
    takes its place.

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
