"""Compiles Triton kernels on several threads before they are needed.

Triton compiles a kernel when it is first launched, and the launching thread waits. Most of the work
is done in C++ or in ptxas without Python's lock, so threads can do it in parallel. Within
`compiling_ahead`, a launch only requests its kernel: a thread compiles it, and nothing is launched.
Code that computes steps can therefore be run once to request all of its kernels. Its results are
meaningless.

Kernels do not write their outputs, so new tensors are filled with zeros. Torch's own operations,
which do run, may use such a tensor as indices, and indices beyond a tensor's end would stop the
device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
# Seconds within which the threads have read some dozen kernels from Triton's folder.
_READ_S = 0.5
# Functions that return tensors with any content, by the object that has them.
_EMPTY = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)


class Requests(ThreadPoolExecutor):
    """The kernels that were requested, and the threads that compile them.

    Attributes:
        compiled: number of kernels that were compiled so far.
        loaded: number of kernels that were read from Triton's folder so far.
    """

    def __init__(self, num_threads: int) -> None:
        """Start without kernels."""
        super().__init__(num_threads, thread_name_prefix="compile")
        self.compiled = self.loaded = 0
        self._lock = threading.Lock()
        self._futures: list[Future[Any]] = []

    def submit(self, fn, /, *args, **kwargs):
        """Start to compile a kernel; Triton calls this."""
        future = super().submit(_with_launcher, fn, *args, **kwargs)
        self._futures.append(future)
        return future

    def note(self, *, cache_hit: bool) -> None:
        """Count a kernel that is ready; any thread may call this."""
        with self._lock:
            self.loaded += cache_hit
            self.compiled += not cache_hit

    def are_in_folder(self) -> bool:
        """Return whether all kernels that were requested so far were in Triton's folder.

        Reading a kernel from the folder takes milliseconds. So a kernel that is not ready soon is
        being compiled.
        """
        _, missing = wait(self._futures, _READ_S)
        return not missing and not self.compiled


def _with_launcher(fn, *args, **kwargs):
    """Compile a kernel, and also the C code that launches it.

    Up to Triton 3.6 a C compiler is run for each kind of arguments, at a kernel's first launch.
    """
    from triton.runtime import driver

    kernel = fn(*args, **kwargs)
    try:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    except Exception as error:
        # The first launch tries again, and reports it.
        logger.debug("No launcher ahead of a kernel's first launch: %s", error)
    return kernel


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that fills the tensors of `make` with zeros."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type != "meta":
            # Some devices cannot fill tensors of 8-bit floats.
            (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).zero_()
        return tensor

    return made


@contextmanager
def compiling_ahead() -> Iterator[Requests | None]:
    """Request kernels instead of launching them, and compile them before the block ends.

    It yields `None`, and launches are as usual, if this Triton cannot compile on threads. No other
    thread may launch a kernel meanwhile. The error of a kernel that cannot be compiled is raised at
    the end of the block, or when the kernel is launched.
    """
    try:
        from triton import knobs
        from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
        from triton.runtime.jit import JITFunction

        launch, listener = JITFunction.run, knobs.compilation.listener
    except (ImportError, AttributeError) as error:
        logger.debug("Kernels are compiled one by one: %s", error)
        yield None
        return

    asked: set[Any] = set()

    def request(kernel, *args, warmup: bool, **options):  # noqa: ARG001
        asked.add(kernel)
        return launch(kernel, *args, warmup=True, **options)

    def note(*args: Any, **compilation: Any) -> None:
        requests.note(cache_hit=bool(compilation.get("cache_hit")))
        if listener is not None:
            listener(*args, **compilation)

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with Requests(threads) as requests, ExitStack() as stack:
        knobs.compilation.listener = note
        stack.callback(setattr, knobs.compilation, "listener", listener)
        stack.callback(_forget_failed, asked, FutureKernel)
        # It waits for the kernels when it exits. By then, launches must work as usual again.
        stack.enter_context(AsyncCompileMode(requests))
        JITFunction.run = request
        stack.callback(setattr, JITFunction, "run", launch)
        # A mode of torch would do the same, but importing what it needs takes seconds.
        for holder, name in _EMPTY:
            make = getattr(holder, name)
            stack.callback(setattr, holder, name, make)
            setattr(holder, name, _zeroed(make))
        yield requests


def _forget_failed(kernels: set[Any], unfinished: type[Any]) -> None:
    """Remove kernels that were not compiled, so that their next launch compiles them."""
    for kernel in kernels:
        for compiled, *_ in kernel.device_caches.values():
            for key, found in list(compiled.items()):
                if isinstance(found, unfinished) and found.kernel is None:
                    del compiled[key]
