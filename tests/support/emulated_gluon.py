"""Runs a Gluon kernel for Hopper on the CPU, with torch; Triton's interpreter has no Gluon.

Layouts are ignored. A copy to shared memory makes its destination NaN at once, and its data arrive
when the kernel waits for them, so a wait that is missing or too late shows in the results.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class Pointer:
    """Places in a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Tensor) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def unsqueeze(self, axis: int) -> Pointer:
        return Pointer(self.memory, self.offset.unsqueeze(axis))

    def load(self, mask: Any = None, other: float = 0.0) -> Tensor:
        """Return what the places hold; those without a `mask` are not touched."""
        if mask is None:
            return self.memory[self.offset]
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        found = self.memory.new_full(offset.shape, other)
        found[mask] = self.memory[offset[mask]]
        return found

    def store(self, value: Any, mask: Any = None) -> None:
        """Write to the places."""
        offset, value = torch.broadcast_tensors(self.offset, torch.as_tensor(value))
        mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.expand_as(offset)
        self.memory[offset[mask]] = value[mask].to(self.memory.dtype)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, at: Any) -> Shared:
        return Shared(self.data[int(at)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Machine:
    """One program at a time, with its copies in flight."""

    def __init__(self) -> None:
        self.at: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        # Groups of copies in flight, and the copies that are not in a group yet.
        self._groups: list[list[tuple[Tensor, Tensor]]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def copy(self, shared: Shared, source: Pointer) -> None:
        self._copies.append((shared.data, source.load()))
        shared.data.fill_(torch.nan)

    def commit(self) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def wait(self, outstanding: int) -> None:
        while len(self._groups) > outstanding:
            for to, data in self._groups.pop(0):
                to.copy_(data)

    def language(self) -> ModuleType:
        """Return the stand-in of `triton.experimental.gluon.language`."""
        gl: Any = ModuleType("language")

        def layout(*_: Any, **__: Any) -> None:
            """Layouts mean nothing here."""

        def shared(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
            return Shared(torch.full(shape, torch.nan, dtype=dtype))

        def filled(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Tensor:
            return torch.full(shape, value, dtype=dtype)

        def either(pick: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
            return lambda a, b: pick(torch.as_tensor(a), torch.as_tensor(b))

        for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout"):
            setattr(gl, name, layout)
        gl.constexpr = Any
        gl.float32, gl.int32, gl.int64 = torch.float32, torch.int32, torch.int64
        gl.program_id = lambda axis: torch.tensor(self.at[axis])
        gl.num_programs = lambda axis: self.grid[axis]
        gl.allocate_shared_memory = shared
        gl.arange = lambda start, end, layout: torch.arange(start, end)
        gl.full = filled
        gl.zeros = lambda shape, dtype, layout: filled(shape, 0.0, dtype, layout)
        gl.load = lambda pointer, mask=None, other=0.0: pointer.load(mask, other)
        gl.store = lambda pointer, value, mask=None: pointer.store(value, mask)
        gl.expand_dims = lambda x, axis: x.unsqueeze(axis)
        gl.convert_layout = lambda x, layout: x
        gl.minimum, gl.maximum = either(torch.minimum), either(torch.maximum)
        gl.cdiv = lambda a, b: (a + b - 1) // b
        gl.where, gl.exp2, gl.log2 = torch.where, torch.exp2, torch.log2
        gl.max = lambda x, axis: x.amax(axis)
        gl.sum = lambda x, axis: x.sum(axis)
        gl.associative_scan = lambda x, axis, _: x.cumsum(axis)
        gl.to_tensor = torch.as_tensor
        gl.barrier = lambda: None
        return gl

    def hopper(self) -> ModuleType:
        """Return the stand-in of the language's module for Hopper."""
        module: Any = ModuleType("hopper")

        def product(a: Shared, b: Shared, acc: Tensor, is_async: bool = False) -> Tensor:
            return a.data.float() @ b.data.float() + acc

        module.async_copy = SimpleNamespace(
            __all__=["async_load"],
            async_load=self.copy,
            commit_group=self.commit,
            wait_group=self.wait,
        )
        module.fence_async_shared = lambda: None
        module.warpgroup_mma = product
        module.warpgroup_mma_wait = lambda outstanding, deps: deps[0]
        return module


class EmulatedKernel:
    """Stands in for a kernel of a module; it is launched in the same way."""

    def __init__(self, module: ModuleType, name: str) -> None:
        """Compile the source of `module` again, with stand-ins for Gluon."""
        assert module.__file__ is not None
        self._machine = Machine()
        gluon: Any = ModuleType("gluon")
        gluon.jit = lambda function: function
        gluon.language = self._machine.language()
        experimental: Any = ModuleType("experimental")
        experimental.gluon = gluon
        prefix = "triton.experimental.gluon"
        names = {
            "triton.experimental": experimental,
            prefix: gluon,
            f"{prefix}.language": gluon.language,
            f"{prefix}.language.nvidia.hopper": self._machine.hopper(),
        }
        code = compile(Path(module.__file__).read_text(), module.__file__, "exec")
        scope: dict[str, Any] = {"__name__": module.__name__}
        with mock.patch.dict(sys.modules, names):
            exec(code, scope)
        self._function = scope[name]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the function that launches the kernel."""

        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            given = [
                Pointer(each.view(-1), torch.tensor(0)) if isinstance(each, Tensor) else each
                for each in arguments
            ]
            self._machine.grid = grid
            for at in itertools.product(*map(range, grid)):
                self._machine.at = at
                self._function(*given, **constants)

        return launch
