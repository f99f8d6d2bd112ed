"""Compiles kernels ahead with a driver that has no GPU; fails if something is wrong.

python -m tests.support.compiled_ahead FOLDER   # which receives compiled kernels
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.activation.triton import sigmoid_mul, sigmoid_mul_kernel
from kernels.linear.triton_gemv import gemv, gemv_kernel
from kernels.triton_support.compile_ahead import compiling_ahead


@triton.jit
def broken_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + undefined)  # type: ignore[name-defined]  # noqa: F821


def request(*, breaks: bool = False) -> tuple[int, int, bool]:
    """Request two kernels twice; return how many were compiled, how many read, and whether all."""
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with compiling_ahead() as requests:
        assert requests is not None
        for _ in range(2):
            made = gemv(x[:1], x, None)
            gated = sigmoid_mul(x, x)
        there = requests.are_in_folder()
        if breaks:
            broken_kernel[(1,)](x)
    assert not made.any(), "the result is not filled with zeros"
    assert not gated.any()
    return requests.compiled, requests.loaded, there


def main() -> None:
    triton.knobs.cache.dir = sys.argv[1]
    # It names the GPU to compile for. A launch would fail.
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    driver.set_active(gpu)  # type: ignore[arg-type]
    launch, listener = JITFunction.run, triton.knobs.compilation.listener
    assert request() == (2, 0, False)
    for kernel in (gemv_kernel, sigmoid_mul_kernel):
        (found,) = kernel.device_caches[0][0].values()
        assert type(found).__name__ == "CompiledKernel", found
        kernel.device_caches.clear()
    assert request() == (0, 2, True), "the compiled kernels are not in the folder"
    try:
        request(breaks=True)
    except triton.CompilationError:
        pass
    else:
        raise AssertionError("a kernel with an error was compiled")
    assert not broken_kernel.device_caches[0][0], "its next launch would not compile it"
    assert JITFunction.run is launch
    assert triton.knobs.compilation.listener is listener


if __name__ == "__main__":
    main()
