"""The C++ library: its build and cache, life without a compiler, other instruction sets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build as build_module
from kernels.cpu import library as library_module
from kernels.norm import NORM

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    library_module.unavailable() is not None, reason="no C++ library here"
)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@needs_compiler
def test_the_library_brings_no_openmp_of_its_own():
    code = """
import re, torch
from kernels.cpu.library import library
library()
maps = open("/proc/self/maps").read()
print("runtimes", len(set(re.findall(r"/\\S*/lib(?:gomp|iomp5|omp)[-.\\w]*", maps))))
"""
    assert run_python(code).strip() in ("runtimes 0", "runtimes 1")


@pytest.fixture
def sources(tmp_path):
    """One short source: what is tested is not the compiler."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    return folder


@needs_compiler
def test_the_wait_for_the_compiler_is_announced_once(tmp_path, sources, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_module.build(sources) == build_module.build(sources)
    assert len(caplog.messages) == 1
    assert "Compiling the CPU kernels" in caplog.text


NO_LOCKS = """
import fcntl
def flock(*_): raise OSError("no locks available")
fcntl.flock = flock
"""


@needs_compiler
@pytest.mark.parametrize(("before", "most"), [("", 1), (NO_LOCKS, 2)], ids=["locks", "no locks"])
def test_of_two_processes_that_need_it_at_once_one_builds(tmp_path, sources, before, most):
    code = f"""{before}
import ctypes, logging, pathlib
from kernels.cpu import build
logging.basicConfig(level=logging.INFO)
path = build.build(pathlib.Path({str(sources)!r}))
assert ctypes.CDLL(path).answer() == 42
print(path)
"""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    (path,) = {out.strip() for out, _ in said}
    num_builds = sum(errors.count("Compiling the CPU kernels") for _, errors in said)
    assert 1 <= num_builds <= most
    assert [str(left) for left in (tmp_path / "headrace").iterdir()] == [path]


def test_without_a_compiler_everything_still_runs(tmp_path):
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import torch
from kernels.norm import NORM, rms_norm
from kernels.activation import act_and_mul
from kernels.linear import LINEAR
x = torch.ones(2, 8)
print(rms_norm(x, torch.ones(8), 1e-6).shape, act_and_mul(x, "silu").shape)
print(NORM.choose("cpu").name, NORM.choose("cpu").reason, LINEAR.choose("cpu").name)
"""
    said = run_python(code, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert "reference cpu: no C++ compiler (g++) on the path" in said
    assert said.count("No C++ kernels: no C++ compiler") == 1


def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho this compiler is broken; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build_module.BuildError, match="this compiler is broken"):
        build_module.build()
    assert list((tmp_path / "cache" / "headrace").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "headrace").write_text("a file is in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if library_module.unavailable() is None:
        with pytest.raises(build_module.BuildError, match="cannot build in"):
            build_module.build()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("march", "needs"), [("x86-64-v2", "sse4_2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512vl")]
)
def test_other_instruction_sets_are_right(march, needs, tmp_path):
    """The vectors of narrower machines, and bfloat16 without dot products, on this one."""
    if build_module.platform.machine() != "x86_64":
        pytest.skip("x86 only")
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no {needs} here")
    code = f"""
import sys, pytest
from kernels.cpu import build
flags = [flag.replace("native", "{march}") for flag in build._FLAGS]
build._FLAGS = tuple(flags)
sys.exit(pytest.main(["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider",
    "tests/kernels/test_attention.py", "tests/kernels/test_linear.py",
    "tests/kernels/test_layer_ops.py", "-k", "cpu and not transformers"]))
"""
    said = run_python(code, XDG_CACHE_HOME=str(tmp_path))
    assert " passed" in said
    assert len(list((tmp_path / "headrace").iterdir())) == 1


@needs_compiler
def test_callers_at_the_same_time_and_changing_thread_counts():
    """Two callers share the helpers; nobody's chunks are lost or run twice."""
    import threading

    import torch

    norm = NORM.load("cpu")
    x = torch.randn(300, 500)
    want = norm.rms_norm(x, torch.ones(500), 1e-6)
    wrong: list[bool] = []

    def call(threads: int) -> None:
        torch.set_num_threads(threads)
        weight = torch.ones(500)
        wrong.extend(not torch.equal(norm.rms_norm(x, weight, 1e-6), want) for _ in range(300))

    before = torch.get_num_threads()
    callers = [threading.Thread(target=call, args=(n,)) for n in (2, 3, 5)]
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert len(wrong) == 900
    assert not any(wrong)
