"""Reads tensors that a trainer provides: safetensors bytes, shared memory, or CUDA memory.

Nothing is unpickled here: a CUDA handle is sent as its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from runtime.checkpoint.headers import read_header
from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import CudaHandle
from runtime.weights.stored_tensors import DTYPES as FILE_DTYPES
from runtime.weights.update_group import DTYPES, first_line, size_bytes, tensor_at
from runtime.weights.weight_files import read_tensors

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Incoming:
    """Tensors by name, and their shapes, which are known before the tensors are read."""

    shapes: dict[str, list[int]]
    tensors: Iterator[tuple[str, Tensor]]


def from_bytes(data: bytes) -> Incoming:
    """Return the tensors of a safetensors file, given its bytes.

    Raises:
        InvalidRequest: the bytes are not a safetensors file.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise InvalidRequest(f"These are not the bytes of a safetensors file: {error}") from error
    _check_floating(
        {name: str(t.dtype) for name, t in tensors.items() if not t.is_floating_point()}
    )
    return Incoming({name: list(t.shape) for name, t in tensors.items()}, iter(tensors.items()))


def from_shared_memory(name: str) -> Incoming:
    """Return the tensors of a safetensors file in shared memory, given its name in `/dev/shm`.

    Raises:
        InvalidRequest: no shared memory has this name.
        StartupError: the memory does not contain a safetensors file.
    """
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidRequest(f"shared_memory: {name[:128]!r} is not a name in {SHARED_MEMORY}.")
    path = SHARED_MEMORY / name
    if path.is_symlink() or not path.is_file():
        raise InvalidRequest(f"shared_memory: there is no {path} on this machine.")
    infos = read_header(path)
    _check_floating({info.name: info.dtype for info in infos if info.dtype not in FILE_DTYPES})
    return Incoming(
        {info.name: list(info.shape) for info in infos},
        read_tensors(path, ((info.name, info) for info in infos)),
    )


def from_cuda(handles: list[CudaHandle], device: torch.device) -> Incoming:
    """Return tensors in a trainer's CUDA memory; they change when the trainer changes them.

    Raises:
        InvalidRequest: the model is on the CPU, the device is not visible, or the memory cannot be
            opened.
    """
    if device.type != "cuda":
        raise InvalidRequest("cuda_ipc needs a model on a GPU; this one is on the CPU.")
    if not handles:
        raise InvalidRequest("cuda_ipc: there is no handle for this rank.")
    shapes = {spec.name: spec.shape for handle in handles for spec, _ in handle.tensors}
    return Incoming(shapes, _open_all(handles))


def _open_all(handles: list[CudaHandle]) -> Iterator[tuple[str, Tensor]]:
    for handle in handles:
        flat = _open(handle)
        for spec, start in handle.tensors:
            if spec.dtype not in DTYPES or not 0 <= start <= len(flat) - size_bytes(spec):
                raise InvalidRequest(f"cuda_ipc: tensor {spec.name!r} does not lie in its memory.")
            yield spec.name, tensor_at(flat, start, spec)
        # Wait for the copies: the trainer may reuse its memory after the answer.
        torch.cuda.synchronize()


def _open(handle: CudaHandle) -> Tensor:
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            _device_index(handle.device_uuid),
            handle.handle,
            handle.storage_size_bytes,
            handle.storage_offset_bytes,
            handle.ref_counter_handle,
            handle.ref_counter_offset,
            handle.event_handle,
            handle.event_sync_required,
        )
    except RuntimeError as error:
        raise InvalidRequest(
            f"cuda_ipc: the memory cannot be opened: {first_line(error)}"
        ) from error
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)


def _device_index(uuid: str) -> int:
    wanted = uuid.removeprefix("GPU-").lower()
    found = []
    for index in range(torch.cuda.device_count()):
        found.append(str(torch.cuda.get_device_properties(index).uuid).lower())
        if found[-1] == wanted:
            return index
    raise InvalidRequest(
        f"cuda_ipc: this process does not see the GPU {uuid!r}; it sees {', '.join(found)}."
    )


def _check_floating(others: dict[str, str]) -> None:
    for name, dtype in others.items():
        raise InvalidRequest(f"Tensor {name!r} is {dtype}; expected a floating type.")
