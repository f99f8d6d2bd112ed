"""Functions with which a trainer sends weights to a server or an engine, without pickle.

Tensors are given as (name, tensor) pairs, or as the dictionary that `state_dict()` returns. A
tensor is complete, and has the name that it has in the Hugging Face checkpoint.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from runtime.ipc.weight_messages import CudaHandle, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

__all__ = [
    "CudaTensors",
    "SharedTensors",
    "adapter_body",
    "adapter_bytes",
    "broadcast_weights",
    "describe_tensors",
    "init_update_group",
    "tensor_body",
]

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 16


def tensor_body(named_tensors: NamedTensors) -> dict[str, Any]:
    """Build the body of `/update_weights_from_tensor`, including the tensors.

    Use it for small updates: base64 makes the tensors a third larger, and the server limits the
    size of a body (`--max-body-mb`). On the server's machine use `SharedTensors` or `CudaTensors`
    instead, which pass tensors of any size.
    """
    from safetensors.torch import save

    data = save(_on_host(named_tensors))
    return {"serialized_named_tensors": [base64.b64encode(data).decode("ascii")]}


def adapter_body(
    name: str,
    config: Mapping[str, Any],
    named_tensors: NamedTensors,
    *,
    pinned: bool = False,
) -> dict[str, Any]:
    """Build the body of `/load_lora_adapter_from_tensors`.

    Args:
        name: the name by which requests will select the adapter.
        config: the content of `adapter_config.json`.
        named_tensors: the tensors under PEFT's names, such as `...q_proj.lora_A.weight`.
        pinned: keep the adapter in the server's memory until it is unloaded.
    """
    data = base64.b64encode(adapter_bytes(named_tensors)).decode("ascii")
    body = {"lora_name": name, "config_dict": dict(config), "serialized_tensors": data}
    return {**body, "pinned": True} if pinned else body


def adapter_bytes(named_tensors: NamedTensors) -> bytes:
    """Return the bytes of a safetensors file that holds the tensors of an adapter."""
    from safetensors.torch import save

    return save(_on_host(named_tensors))


class _Lent:
    """A context manager around memory that the server reads; the memory is freed at its end."""

    def close(self) -> None:
        """Free the memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedTensors(_Lent):
    """A copy of tensors in this machine's shared memory, for a server on the same machine.

    It is a context manager that removes the shared memory at its end.

    Attributes:
        body: body of `/update_weights_from_tensor`; it is valid until the context ends.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        """Copy the tensors to shared memory."""
        from safetensors.torch import save_file

        self._path = _SHARED_MEMORY / f"headrace-{os.getpid()}-{secrets.token_hex(8)}"
        # The file is created here, readable only by this user, before the library writes to it. The
        # library itself would create a file that other users may read.
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            save_file(_on_host(named_tensors), self._path)
        except BaseException:
            self.close()
            raise
        self.body: dict[str, Any] = {"shared_memory": self._path.name}

    def close(self) -> None:
        """Remove the shared memory."""
        self._path.unlink(missing_ok=True)


class CudaTensors(_Lent):
    """A copy of tensors on a GPU, which a server on the same GPU, or on a peer GPU, reads directly.

    Keep the object until the server has answered the update, or send the update inside a `with`
    block of this object.

    Attributes:
        body: body of `/update_weights_from_tensor`.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        """Copy the tensors, all on one GPU, into one contiguous allocation on it."""
        import torch

        pairs = list(_pairs(named_tensors))
        starts, size = [], 0
        for _, tensor in pairs:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = pairs[0][1].device
        flat = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        for start, (_, tensor) in zip(starts, pairs, strict=True):
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            flat[start : start + tensor.nbytes].copy_(raw)
        torch.cuda.synchronize(device)
        self._flat: Tensor | None = flat
        shared = flat.untyped_storage()._share_cuda_()
        handle = CudaHandle(
            device_uuid=str(torch.cuda.get_device_properties(device).uuid),
            handle=shared[1],
            storage_size_bytes=shared[2],
            storage_offset_bytes=shared[3],
            ref_counter_handle=shared[4],
            ref_counter_offset=shared[5],
            event_handle=shared[6],
            event_sync_required=shared[7],
            tensors=[
                (_spec(name, tensor), start)
                for start, (name, tensor) in zip(starts, pairs, strict=True)
            ],
        )
        self.body: dict[str, Any] = {"cuda_ipc": [[msgspec.to_builtins(handle)]]}

    def close(self) -> None:
        """Free the memory."""
        self._flat = None


def init_update_group(
    master_address: str,
    master_port: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
) -> Any:
    """Join the process group for weight updates as rank 0, which is the trainer.

    It returns when every rank has joined. Call it while a request to `/init_weights_update_group`
    with the same values and `rank_offset` 1 is in progress, because each waits for the other.

    Args:
        master_address: the address at which the server reaches this machine.
        master_port: a free port of this machine.
        world_size: 1 plus the server's number of tensor-parallel ranks.
        group_name: the name that the server uses.
        backend: `nccl` between GPUs, `gloo` for tensors on the CPU.
    """
    from runtime.weights.update_group import create_group

    return create_group(master_address, master_port, 0, world_size, group_name, backend)


def describe_tensors(named_tensors: NamedTensors) -> dict[str, Any]:
    """Return `names`, `dtypes` and `shapes` for the body of `/update_weights_from_distributed`."""
    specs = [_spec(name, tensor) for name, tensor in _pairs(named_tensors)]
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [spec.shape for spec in specs],
    }


def broadcast_weights(named_tensors: NamedTensors, group: Any, *, flattened: bool = False) -> None:
    """Broadcast the tensors to a server, which must already wait for exactly these tensors.

    Args:
        named_tensors: the tensors, in the order of the request.
        group: the result of `init_update_group`. With `nccl` the tensors must be on a GPU, with
            `gloo` on the CPU.
        flattened: send all tensors in one broadcast; the request must then have
            `"load_format": "flattened_bucket"`.
    """
    import torch
    import torch.distributed as dist

    tensors = [tensor.detach().contiguous() for _, tensor in _pairs(named_tensors)]
    if flattened:
        tensors = [torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])]
    for tensor in tensors:
        dist.broadcast(tensor, group_src=0, group=group)


def _pairs(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    if isinstance(named_tensors, Mapping):
        yield from named_tensors.items()
    else:
        yield from named_tensors


def _on_host(named_tensors: NamedTensors) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _pairs(named_tensors):
        plain = tensor.detach().to("cpu").contiguous()
        # The format does not allow two names for the same memory, so tied weights are copied.
        found[name] = plain.clone() if plain.untyped_storage().data_ptr() in seen else plain
        seen.add(plain.untyped_storage().data_ptr())
    return found


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
