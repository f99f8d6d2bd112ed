"""Compiles the C++ library once per machine and keeps it in the user's cache folder.

The library is plain C++ with its own threads (`pool.h`), without torch headers or OpenMP, so
compiling takes a few seconds.

The file's name contains a hash of the sources, the flags, the compiler and the CPU's instruction
sets. So several machines can share a cache folder: each loads a library for its own instructions.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent
# The instruction set. Tests and benchmarks set that of other CPUs: `x86-64-v3` is AVX2.
_MARCH = os.environ.get("HEADRACE_MARCH", "native")
_FLAGS = ("-std=c++20", "-O3", f"-march={_MARCH}", "-pthread", "-fPIC", "-fno-math-errno")
# On two cores that ten other processes used as well, the compilers took 135 s.
_TIMEOUT_S = 1200.0
# Errors of a machine that lacks processes, memory or descriptors for a moment.
_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY})
_DELAYS_S = (0.1, 0.3, 1.0, 3.0)
ResultT = TypeVar("ResultT")


class BuildError(RuntimeError):
    """The library could not be built; the message says why.

    Attributes:
        is_passing: whether another attempt may succeed.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        """Store the message."""
        super().__init__(message)
        self.is_passing = is_passing


def insist(attempt: Callable[[], ResultT]) -> ResultT:
    """Return the result of `attempt`; if a busy machine is the cause of an error, repeat it.

    Without this, a worker that replaces another one on a busy machine could run plain torch instead
    of the library. Its results have other bits, so the answers that it continues would change.

    Raises:
        BuildError, OSError: the last error of `attempt`.
    """
    for delay_s in _DELAYS_S:
        try:
            return attempt()
        except (BuildError, OSError) as error:
            if not _is_passing(error):
                raise
            logger.warning("The CPU kernels are not available yet: %s. Trying again.", error)
        time.sleep(delay_s)
    return attempt()


def _is_passing(error: BuildError | OSError) -> bool:
    return error.is_passing if isinstance(error, BuildError) else error.errno in _PASSING


def library_dir() -> Path:
    """Return the folder of built libraries: `$HEADRACE_CACHE_DIR`, or `cache_dir()`."""
    given = os.environ.get("HEADRACE_CACHE_DIR", "")
    return Path(given) if given else cache_dir()


def cache_dir() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/headrace` or `~/.cache/headrace`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "headrace"


def build(folder: Path = _SOURCE_DIR) -> Path:
    """Return the path of the built library; compile it if it is not in the cache.

    If several processes build at once, one compiles and the others wait, so that ranks and replicas
    do not compile it repeatedly. On a file system without locks, each process compiles its own file
    and renames it into place.

    Args:
        folder: folder of the sources.

    Raises:
        BuildError: the compiler is missing or failed, or the cache folder cannot be written.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++) on the path")
    sources = sorted(folder.glob("*.cpp"))
    target = library_dir() / f"cpu_kernels-{_key(compiler, folder)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(target.parent):
            if not target.exists():
                name = Path(compiler).name
                logger.info("Compiling the CPU kernels with %s, once per machine", name)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
                    _compile(compiler, sources, Path(work), target)
    except OSError as error:
        message = f"cannot build in {target.parent}: {error}"
        raise BuildError(message, is_passing=_is_passing(error)) from error
    return target


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Waiting for another process that compiles the CPU kernels")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, sources: list[Path], work: Path, target: Path) -> None:
    objects = [work / f"{source.stem}.o" for source in sources]
    compiles = [
        subprocess.Popen(
            [compiler, *_FLAGS, "-c", str(source), "-o", str(built)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source, built in zip(sources, objects, strict=True)
    ]
    _wait(compiles)
    library = work / target.name
    _wait(
        [
            subprocess.Popen(
                [compiler, "-shared", "-o", str(library), *map(str, objects), "-pthread"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        ]
    )
    library.replace(target)


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    failures = []
    was_killed = False
    for process in processes:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failures.append("the compiler took too long")
            continue
        if process.returncode != 0:
            failures.append(output.strip()[-500:] or f"exit status {process.returncode}")
            # A system that runs out of memory kills the compiler, or a part that it has started.
            was_killed |= process.returncode < 0 or "Killed signal" in output
    if failures:
        raise BuildError(f"the compiler failed: {failures[0]}", is_passing=was_killed)


def _key(compiler: str, folder: Path) -> str:
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} does not tell its version: {error}") from error
    if version.returncode < 0:
        # Without the whole version, the key would be that of another library.
        raise BuildError(f"{compiler} was killed", is_passing=True)
    parts = [*_FLAGS, version.stdout, platform.machine(), _cpu_flags()]
    for path in sorted((*folder.glob("*.cpp"), *folder.glob("*.h"))):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    found = [line for line in lines if line.startswith(wanted)]
    return "\n".join(dict.fromkeys(found))
