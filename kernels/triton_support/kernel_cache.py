"""Replaces Triton's folder of compiled kernels by a copy if the folder is not writable."""

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def is_writable(folder: Path) -> bool:
    """Whether this process can create files in a folder.

    It tries, because a mount may forbid even root to write.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def use_writable_cache() -> Path | None:
    """Let Triton compile into a copy of its cache folder if the folder is not writable.

    Triton compiles kernels that are not in its folder, and fails if it cannot write them to it. If
    the folder does not exist, it is created, as Triton would do. If that fails, an empty folder is
    used instead.

    Returns:
        The copy; `None` if the folder is writable.
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
