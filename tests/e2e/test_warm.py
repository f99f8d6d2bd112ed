"""`headrace warm` and folders of compiled kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.warm import environment
from kernels.cpu.build import library_dir
from kernels.triton_support.kernel_cache import use_writable_cache
from runtime.checkpoint.demo import TOY_NAME
from tests.support.server import ROOT, python_path

# Of any Linux; small files, which root may not add to either.
READ_ONLY = Path("/proc/sys/kernel/keys")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", "warm", *arguments],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_folder_is_used_and_named(tmp_path: Path) -> None:
    """A CPU's library is found there: it is not compiled again."""
    folder = tmp_path / "kernels"
    (folder / "headrace").mkdir(parents=True)
    libraries = list(library_dir().glob("cpu_kernels-*.so"))
    for library in libraries:
        shutil.copy(library, folder / "headrace")
    found = run(TOY_NAME, "--out", str(folder), "--device", "cpu", "--max-total-tokens", "2048")
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"in {folder}, after" in found.stderr
    for name, value in environment(folder).items():
        assert f"{name}={value}" in found.stderr
    assert {path.name for path in folder.rglob("*.so")} >= {path.name for path in libraries}


WHERE = """
from huggingface_hub import constants
from kernels.cpu.build import library_dir
from runtime.checkpoint.demo import fetched_models
print(constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH, fetched_models(), library_dir())
"""


def test_models_and_tokens_stay_where_they_were(tmp_path: Path) -> None:
    """Downloads do not belong to compiled kernels, and a server must find them."""

    def places(changes: dict[str, str]) -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", WHERE],
            env={**os.environ, "PYTHONPATH": python_path(), **changes},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        ).stdout.split()

    plain, changed = places({}), places(environment(tmp_path))
    assert changed[:-1] == plain[:-1]
    assert changed[-1] == str(tmp_path / "headrace")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    missing = run("--model-path", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert missing.returncode == 1
    assert len(missing.stderr.strip().splitlines()) == 1
    assert run(TOY_NAME).returncode == 2


@pytest.mark.skipif(not READ_ONLY.is_dir(), reason="no folder that even root cannot write to")
def test_a_folder_that_may_only_be_read_is_copied(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assert use_writable_cache() is None
        triton.knobs.cache.dir = str(READ_ONLY)
        copy = use_writable_cache()
        assert copy is not None
        assert triton.knobs.cache.dir == str(copy)
        assert {path.name for path in copy.iterdir()} == {path.name for path in READ_ONLY.iterdir()}
        shutil.rmtree(copy)
        # A root file system that may only be read, without the folder.
        triton.knobs.cache.dir = str(READ_ONLY / "none" / "cache")
        empty = use_writable_cache()
        assert empty is not None
        assert triton.knobs.cache.dir == str(empty)
        assert not list(empty.iterdir())
        empty.rmdir()
        # Triton would make a folder that can be made.
        triton.knobs.cache.dir = str(tmp_path / "new" / "cache")
        assert use_writable_cache() is None
