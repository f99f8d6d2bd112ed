"""Compiles the C++ library once per machine and keeps it in the user's cache folder.

The library is plain C++ with its own threads (`pool.h`), without torch headers or OpenMP, so
compiling takes a few seconds.

The file's name contains a hash of the sources, the flags, the compiler and the CPU's instruction
sets. So several machines can share a cache folder: each loads a library for its own instructions.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent
# The instruction set. Tests and benchmarks set that of other CPUs: `x86-64-v3` is AVX2.
_MARCH = os.environ.get("HEADRACE_MARCH", "native")
_FLAGS = ("-std=c++20", "-O3", f"-march={_MARCH}", "-pthread", "-fPIC", "-fno-math-errno")
_TIMEOUT_S = 300.0


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


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
        raise BuildError(f"cannot build in {target.parent}: {error}") from error
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
    for process in processes:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            failures.append("the compiler took too long")
        if process.returncode != 0:
            failures.append(output.strip()[-500:] or f"exit status {process.returncode}")
    if failures:
        raise BuildError(f"the compiler failed: {failures[0]}")


def _key(compiler: str, folder: Path) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
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
