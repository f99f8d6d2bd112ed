"""Records what a function computes with tensors, to repeat it without its Python code.

For a small model, the Python code between two kernels of a decode step takes as long as a kernel. A
recording runs the kernels of the C++ library in one call, and torch's own operators in between. It
is for a CPU what a CUDA graph is for a GPU. It reads and writes the same memory every time, and it
repeats the branches that Python took when it was made.

Intermediate tensors get memory from the recording. As in a normal run, the memory of a tensor is
reused when Python has dropped the tensor.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.library import RECORDABLE, SIGNATURES, library

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.empty_like.default,
    }
)
# Operators whose result has a shape, or is a number, that depends on the values of tensors.
_READS_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_ALIGNMENT = 64

Step = Callable[[], None]


class Recording:
    """What a function computed once.

    `repeat` computes it again from the current content of its inputs.

    Attributes:
        result: the tensor that the function returned. Each `repeat` overwrites it.
    """

    def __init__(self, result: Tensor, steps: list[Step], kept: list[Any]) -> None:
        self.result = result
        self._steps = steps
        # Everything whose address is in the recording and that this module allocated.
        self._kept = kept

    @property
    def size_bytes(self) -> int:
        """Memory of the intermediate tensors."""
        return sum(each.nbytes for each in self._kept if isinstance(each, Tensor))

    def repeat(self) -> None:
        """Compute `result` again from the current content of the inputs."""
        for step in self._steps:
            step()


def record(compute: Callable[[], Tensor]) -> tuple[Tensor, Recording | None, str]:
    """Run a function, and record it.

    The function must take all its changing inputs from tensors whose memory stays the same, and
    must not branch on the values of tensors. It runs on one thread. Another thread may call the
    library's functions meanwhile.

    Returns:
        The function's result; the recording, or `None` if the function cannot be recorded; and the
        reason why it cannot, or an empty text.
    """
    recorder = _Recorder()
    with recorder:
        result = compute()
    if recorder.problem:
        return result, None, recorder.problem
    return result, Recording(result, recorder.finished(), recorder.kept), ""


class _Recorder(TorchDispatchMode):
    """Records the operators of torch and the functions of the library that run while it is active.

    Attributes:
        problem: the first thing that cannot be repeated; empty if there is none.
        kept: what must stay alive as long as the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem = ""
        self.kept: list[Any] = []
        self._steps: list[Step] = []
        # Calls of the library since the last operator of torch; see kernels/cpu/recording.cpp.
        self._words = array("q")
        self._num_calls = 0
        # Memory of tensors that are gone, by size.
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, torch's default, imports the compiler of torch in the midst of a step.
        return False

    def __enter__(self) -> _Recorder:
        for name in SIGNATURES:
            getattr(library(), name).errcheck = self._watch(name)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for name in SIGNATURES:
            del getattr(library(), name).errcheck

    def finished(self) -> list[Step]:
        """Return the recorded steps, functions to be called in order."""
        self._end_calls()
        return self._steps

    def _watch(self, name: str) -> Callable[[None, Any, tuple[Any, ...]], None]:
        """Return a function for ctypes to call after each call of the library's function `name`."""
        address: int | None = None
        if name in RECORDABLE:
            address = ctypes.cast(getattr(library(), f"{name}_words"), ctypes.c_void_p).value

        def note(_: None, __: Any, args: tuple[Any, ...]) -> None:
            if threading.get_ident() != self._thread:
                return
            if address is None:
                self.problem = self.problem or f"{name} cannot be repeated"
                return
            self._words.extend((address, len(args), *map(_word, args)))
            self._num_calls += 1

        return note

    def _end_calls(self) -> None:
        """Append a step that repeats the library calls made since the previous step."""
        if not self._num_calls:
            return
        words, count, repeat = self._words, self._num_calls, library().hr_repeat_calls
        address, _ = words.buffer_info()
        self.kept.append(words)
        self._steps.append(lambda: repeat(address, count))
        self._words, self._num_calls = array("q"), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS and isinstance(result, Tensor) and result.is_contiguous():
            return self._allocated(result)
        schema = func._schema
        if any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments):
            self._note(lambda: func(*args, **kwargs))
        elif any(one.alias_info is not None for one in schema.returns) and _is_view(result, args):
            _keep_sources(result, args)
        elif _READS_VALUES.intersection(func.tags):
            self.problem = self.problem or f"{func} depends on the values of tensors"
        else:
            results = result if isinstance(result, tuple) else (result,)
            self.kept += results
            self._note(lambda: _compute_again(func, args, kwargs, results))
        return result

    def _note(self, step: Step) -> None:
        self._end_calls()
        self._steps.append(step)

    def _allocated(self, plain: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of `plain`, in memory that the recording owns."""
        size = plain.nbytes
        free = self._free[size]
        if free:
            block = free.pop()
        else:
            memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            start = -memory.data_ptr() % _ALIGNMENT
            block = memory[start : start + size]
            self.kept.append(block)
        made = block.view(plain.dtype).view(plain.shape)
        weakref.finalize(made, free.append, block).atexit = False
        return made


def _word(value: Any) -> int:
    """Return an argument as a 64-bit word; see kernels/cpu/recording.h."""
    if isinstance(value, float):
        (word,) = struct.unpack("q", struct.pack("d", value))
        return int(word)
    return 0 if value is None else int(value)


def _compute_again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]
) -> None:
    again = func(*args, **kwargs)
    again = again if isinstance(again, tuple) else (again,)
    for old, new in zip(results, again, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)


def _is_view(views: Any, args: tuple[Any, ...]) -> bool:
    """Whether results share memory with arguments; results of `to` and `reshape` may be copies."""
    memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    found = views if isinstance(views, (list, tuple)) else (views,)
    return all(
        view.untyped_storage().data_ptr() in memory for view in found if isinstance(view, Tensor)
    )


def _keep_sources(views: Any, args: tuple[Any, ...]) -> None:
    """Keep each viewed tensor alive as long as its views."""
    sources = [arg for arg in args if isinstance(arg, Tensor)]
    for view in views if isinstance(views, (list, tuple)) else (views,):
        if isinstance(view, Tensor):
            view._recorded_sources = sources  # type: ignore[attr-defined]
