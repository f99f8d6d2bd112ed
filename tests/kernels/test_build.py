"""The C++ library: its build and cache, life without a compiler, other instruction sets."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import build as build_module
from kernels.cpu import library as library_module
from kernels.norm import NORM
from kernels.quantized_linear import FORMS
from tests.kernels.test_quantized_linear import stored_matrix

ROOT = Path(__file__).parents[2]
CPU = ROOT / "kernels" / "cpu"

needs_compiler = pytest.mark.skipif(
    library_module.unavailable() is not None, reason="no C++ library here"
)


def run_python(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
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


REFUSED_TWICE = """
import subprocess
real = subprocess.run
refusals = [OSError(errno.ENOMEM, "memory"), BlockingIOError(errno.EAGAIN, "processes")]
def run(*args, **options):
    if refusals:
        raise refusals.pop()
    return real(*args, **options)
subprocess.run = run
"""
# A compiler that is killed when it is first started with `argument`.
KILLED_ONCE = """#!/bin/sh
case "$*" in
*{argument}*) if mkdir "{folder}/was-killed" 2> /dev/null; then kill -9 $$; fi ;;
esac
exec {compiler} "$@"
"""


def killed_once(folder: Path, argument: str) -> str:
    """Write such a compiler; return a PATH on which it is the first."""
    compiler = shutil.which("g++") or shutil.which("c++")
    written = folder / "g++"
    written.write_text(KILLED_ONCE.format(argument=argument, folder=folder, compiler=compiler))
    written.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@needs_compiler
@pytest.mark.parametrize("how", ["refused", "killed"])
def test_a_new_process_on_a_busy_machine_loads_the_same_library(tmp_path, how):
    """Otherwise a worker continues the answers of its predecessor with other kernels."""
    code = f"""
import errno
{REFUSED_TWICE if how == "refused" else ""}
from kernels.cpu import build, library
print(library.unavailable(), build.build())
"""
    path = killed_once(tmp_path, "--version") if how == "killed" else os.environ["PATH"]
    said = run_python(code, PATH=path)
    assert said.splitlines()[0] == f"None {build_module.build()}"
    assert (tmp_path / "was-killed").exists() == (how == "killed")


@needs_compiler
def test_a_compiler_that_was_killed_is_started_again(tmp_path, sources, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", killed_once(tmp_path, "-shared"))
    with pytest.raises(build_module.BuildError):
        build_module.build(sources)
    (tmp_path / "was-killed").rmdir()
    built = build_module.insist(lambda: build_module.build(sources))
    assert ctypes.CDLL(built).answer() == 42
    assert (tmp_path / "was-killed").exists()


def test_a_lasting_error_of_the_build_is_raised_at_once():
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise build_module.BuildError("broken")

    with pytest.raises(build_module.BuildError, match="broken"):
        build_module.insist(attempt)
    assert len(attempts) == 1


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
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider",
    "tests/kernels/test_attention.py", "tests/kernels/test_linear.py",
    "tests/kernels/test_layer_ops.py", "-k", "cpu and not transformers"]))
"""
    said = run_python(code, XDG_CACHE_HOME=str(tmp_path), HEADRACE_MARCH=march)
    assert " passed" in said
    assert len(list((tmp_path / "headrace").iterdir())) == 1


STORED_PRODUCTS = """
import hashlib, pathlib, sys, torch
from kernels.cpu import build, library
(folder,) = sys.argv[1:]
# Their sources alone: a compiler takes a while for them all.
for table in (library.SIGNATURES, library._RESULTS):
    for name in list(table):
        if not name.startswith(("hr_stored", "hr_dots")):
            del table[name]
library.build = lambda: build.build(pathlib.Path(folder))
from kernels.quantized_linear import FORMS, pack
from kernels.quantized_linear.cpu import dots_name
from tests.kernels.test_quantized_linear import TOKENS, stored_matrix
digest = hashlib.sha256()
x = torch.randn(max(TOKENS), 768, generator=torch.Generator().manual_seed(0))
for form in FORMS:
    packed = pack([stored_matrix(form, 53, 768)], 768)
    for tokens in TOKENS:
        digest.update(packed(x[:tokens].contiguous()).numpy().tobytes())
print(dots_name(), digest.hexdigest(), sep=",")
"""
# What a CPU must have, by its flags, for code of a kind; and what the products then use.
DOTS = {
    "x86-64": ("sse2", "plain C++"),
    "x86-64-v2": ("ssse3", "SSSE3"),
    "x86-64-v3": ("avx2", "AVX2"),
    "alderlake": ("avx_vnni", "AVX-VNNI"),
    "x86-64-v4": ("avx512bw", "AVX-512 BW"),
    "icelake-server": ("avx512_vnni", "AVX-512 VNNI"),
}


def digest_of_stored_products(march: str, folder: Path) -> tuple[str, str]:
    """The instructions that were used, and what all forms and numbers of rows come to."""
    sources = folder / "sources"
    if not sources.exists():
        sources.mkdir()
        for path in CPU.iterdir():
            if path.suffix == ".h" or path.name in ("pool.cpp", "stored.cpp", "stored_linear.cpp"):
                shutil.copy(path, sources)
    environment = {"XDG_CACHE_HOME": str(folder), "HEADRACE_MARCH": march}
    said = run_python(STORED_PRODUCTS, str(sources), **environment)
    name, digest = said.strip().splitlines()[-1].split(",")
    return name, digest


@pytest.fixture(scope="module")
def plain_digest(tmp_path_factory):
    """Without any instruction for bytes."""
    return digest_of_stored_products("x86-64", tmp_path_factory.mktemp("plain"))[1]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("march", DOTS)
def test_stored_products_have_the_same_bits_on_every_instruction_set_but_amx(
    march, tmp_path, plain_digest
):
    if build_module.platform.machine() != "x86_64":
        pytest.skip("x86 only")
    needs, name = DOTS[march]
    if needs not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"no {needs} here")
    assert digest_of_stored_products(march, tmp_path) == (name, plain_digest)


@needs_compiler
@pytest.mark.slow
def test_stored_products_without_amx_are_right(tmp_path):
    """On a machine with AMX nothing else would try them."""
    if build_module.platform.machine() != "x86_64":
        pytest.skip("x86 only")
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("no avx2 here")
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider",
    "tests/kernels/test_quantized_linear.py"]))
"""
    said = run_python(code, XDG_CACHE_HOME=str(tmp_path), HEADRACE_MARCH="x86-64-v3")
    assert " passed" in said


# Reads "form in out tokens threads", stored rows and float32 rows; writes the product, and the
# stored rows once they were packed and unpacked.
DRIVER = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
extern "C" {
int64_t hr_stored_panel_bytes(int64_t, int64_t);
const char *hr_dots_name(void);
void hr_stored_pack(int64_t, const void *, void *, int64_t, int64_t, int64_t);
void hr_stored_unpack(int64_t, const void *, void *, int64_t, int64_t, int64_t);
void hr_stored_linear(int64_t, const void *, const void *, int64_t, const void *, void *, int64_t,
                      int64_t, int64_t, int64_t);
}
int main() {
    std::fprintf(stderr, "%s", hr_dots_name());
    int64_t form, in, out, tokens, bytes;
    while (std::scanf("%ld %ld %ld %ld %ld", &form, &in, &out, &tokens, &bytes) == 5) {
        std::getchar();
        std::vector<char> stored(bytes), back(bytes);
        std::vector<float> x(tokens * in), y(tokens * out);
        if (std::fread(stored.data(), 1, bytes, stdin) != (size_t)bytes) return 1;
        if (std::fread(x.data(), 4, x.size(), stdin) != x.size()) return 1;
        int64_t size = (out + 15) / 16 * hr_stored_panel_bytes(form, in);
        void *panels = std::aligned_alloc(64, (size + 63) / 64 * 64);
        hr_stored_pack(form, stored.data(), panels, in, out, 2);
        hr_stored_unpack(form, panels, back.data(), in, out, 2);
        int64_t part[4] = {form, (int64_t)panels, out, 0};
        hr_stored_linear(0, x.data(), part, 1, nullptr, y.data(), tokens, in, out, 2);
        std::fwrite(y.data(), 4, y.size(), stdout);
        std::fwrite(back.data(), 1, bytes, stdout);
    }
}
"""
ARM = {
    "armv8-a": "plain C++",
    "armv8.2-a+dotprod": "NEON dot",
    "armv8.2-a+dotprod+i8mm": "NEON i8mm",
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("march", ARM)
def test_stored_products_on_arm_have_the_bits_of_x86(march, tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no g++-aarch64-linux-gnu and qemu-user here")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    names = ("pool.cpp", "stored.cpp", "stored_linear.cpp")
    sources = [str(tmp_path / "driver.cpp"), *(str(CPU / n) for n in names)]
    flags = ["-std=c++20", "-O3", "-fno-math-errno", "-pthread", "-static", *sources, "-o"]
    program, here = str(tmp_path / "driver"), str(tmp_path / "here")
    subprocess.run([compiler, f"-march={march}", *flags, program], check=True)
    subprocess.run(["g++", "-march=x86-64", *flags, here], check=True)
    x = torch.randn(6, 768)
    given = b""
    for number, form in enumerate(FORMS):
        stored = stored_matrix(form, 53, 768)
        for tokens in (1, 2, 6):
            rows, data = x[:tokens].contiguous(), stored.data.numpy().tobytes()
            given += f"{number} 768 53 {tokens} {len(data)}\n".encode()
            given += data + rows.numpy().tobytes()
    done = subprocess.run([emulator, "-cpu", "max", program], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.decode() == ARM[march]
    assert done.stdout == subprocess.run([here], input=given, capture_output=True).stdout


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
