"""Process groups with a trainer, whose rank 0 broadcasts new weights to all of this engine's ranks.

The processes meet as in `init_custom_process_group`, which RL trainers use. torch's own functions
allow one default group in a process, and the ranks of tensor parallelism already have theirs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import (
    BROADCAST_TIMEOUT_S,
    JoinGroup,
    ReceiveTensors,
    TensorSpec,
)

logger = logging.getLogger(__name__)

# The time for one broadcast, unless the request sets another.
_WORK_TIMEOUT = timedelta(seconds=BROADCAST_TIMEOUT_S)
_POLL_S = 0.002
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}


def create_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float = BROADCAST_TIMEOUT_S,
) -> Any:
    """Join a process group; return the object that `torch.distributed.broadcast` takes as `group`.

    Args:
        address: address of a TCP store that rank 0 opens and the others connect to.
        port: port of that store.
        rank: rank of this process in the group.
        world_size: number of processes in the group.
        name: name of the group, the same in all of them.
        backend: `gloo` or `nccl`.
        timeout_s: seconds until all processes must have joined.
    """
    timeout = timedelta(seconds=timeout_s)
    hosts = f"[{address}]" if ":" in address else address
    store, rank, world_size = next(
        rendezvous(f"tcp://{hosts}:{port}", rank, world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    with _default_group_unbound():
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            distributed_c10d.PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]  # a `NewType` of str in some torch versions
            # With NCCL, the timeout is longer than `_broadcast` waits, because NCCL's watchdog ends
            # the process when it expires.
            timeout=2 * _WORK_TIMEOUT if backend == "nccl" else _WORK_TIMEOUT,
        )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


@contextlib.contextmanager
def _default_group_unbound() -> Iterator[None]:
    """Hide the GPU that the default process group is bound to, if any, while the block runs.

    Otherwise torch would make the new group by splitting the default group's communicator. Then all
    members of the default group would have to take part, and only they could. But the trainer is
    not a member of the default group.
    """
    default = dist.group.WORLD if dist.is_initialized() else None
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@dataclass
class _Reception:
    """The state of a broadcast that this rank receives.

    Attributes:
        received: names and tensors; `None` before they arrived and after an error.
        error: why nothing was received; empty if there is no error.
        is_done: whether the broadcast ended; `received` or `error` is set before.
    """

    received: list[tuple[str, Tensor]] | None = None
    error: str = ""
    is_done: bool = False


@dataclass
class _Member:
    """One group that this rank is in; `group` is set once all processes have joined."""

    name: str
    backend: str
    is_joining: bool = True
    is_left: bool = False
    is_broken: bool = False
    group: Any = None
    error: str = ""
    reception: _Reception | None = None


class UpdateGroups:
    """The groups that this rank is in. No method waits: threads join, receive and leave."""

    def __init__(self, tp_rank: int, device: torch.device) -> None:
        """Begin without groups.

        Args:
            tp_rank: this rank's number, which is added to a group's `rank_offset`.
            device: the device that receives tensors with NCCL.
        """
        self._tp_rank = tp_rank
        self._device = device
        self._members: dict[str, _Member] = {}
        # For each group's name, the thread that is ending it.
        self._leaving: dict[str, threading.Thread] = {}

    def join(self, request: JoinGroup) -> None:
        """Begin to join a group, and return at once; `is_joined` says when all have joined.

        Raises:
            InvalidRequest: the group exists, or its back end cannot work here.
        """
        if request.group_name in self._members:
            raise InvalidRequest(
                f"The group {request.group_name!r} exists; destroy it first or choose another name."
            )
        if request.backend == "nccl" and self._device.type != "cuda":
            raise InvalidRequest(
                "backend 'nccl' needs a GPU; this model runs on the CPU: use 'gloo'."
            )
        member = self._members[request.group_name] = _Member(request.group_name, request.backend)
        # The thread is a daemon, so that a trainer that never comes cannot keep the process alive.
        threading.Thread(
            target=self._meet, args=(member, request), name="update-group", daemon=True
        ).start()

    def _meet(self, member: _Member, request: JoinGroup) -> None:
        try:
            self._set_device()
            # A group of the same name may still be ending, so wait for that.
            if (leaving := self._leaving.get(member.name)) is not None:
                leaving.join()
            with _interface_for(request.master_address):
                member.group = create_group(
                    request.master_address,
                    request.master_port,
                    request.rank_offset + self._tp_rank,
                    request.world_size,
                    request.group_name,
                    request.backend,
                    request.timeout_s,
                )
        # Any error of the library is reported to the client and does not end the process.
        except Exception as error:
            member.error = first_line(error)
        finally:
            member.is_joining = False
        if member.is_left and member.group is not None:
            self._end(member)

    def _set_device(self) -> None:
        # A new thread uses GPU 0 until it sets its device.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def is_joined(self, name: str) -> bool:
        """Whether all processes have joined a group.

        Raises:
            InvalidRequest: joining failed, and the group is forgotten; or there is no such group.
        """
        member = self._member(name)
        if member.is_joining:
            return False
        if member.group is None:
            del self._members[name]
            raise InvalidRequest(f"The group {name!r} could not be joined: {member.error}")
        return True

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            InvalidRequest: no group has that name.
        """
        self._member(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        member = self._members.pop(name)
        member.is_left = True
        if member.reception is not None and not member.reception.is_done:
            member.is_broken = True
        if member.group is not None:
            # The group is ended on a thread, because NCCL may wait until the trainer leaves too.
            thread = threading.Thread(
                target=self._end, args=(member,), name="update-group-end", daemon=True
            )
            self._leaving[name] = thread
            thread.start()

    def _end(self, member: _Member) -> None:
        group, member.group = member.group, None
        if group is None:
            return
        try:
            self._set_device()
            if member.is_broken and member.backend == "nccl":
                # A broadcast without a sender is running, so ending in order would wait for it.
                distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
        except Exception as error:
            logger.warning("The group %r did not end in order: %s", member.name, first_line(error))

    def receive(self, request: ReceiveTensors) -> None:
        """Begin to receive the tensors that a group's rank 0 broadcasts, and return at once.

        Raises:
            InvalidRequest: there is no such group, it is not complete, or it is receiving already.
        """
        name = request.group_name
        if not self.is_joined(name):
            raise InvalidRequest(f"The group {name!r} is not complete yet.")
        member = self._members[name]
        if member.reception is not None and not member.reception.is_done:
            raise InvalidRequest(f"The group {name!r} still waits for another broadcast.")
        # Tensors that an earlier broadcast brought and that were not taken are dropped.
        member.reception = _Reception()
        threading.Thread(
            target=self._receive,
            args=(member, member.reception, request),
            name="update-group-receive",
            daemon=True,
        ).start()

    def is_received(self, name: str) -> bool:
        """Whether all tensors of a group's broadcast have come.

        Raises:
            InvalidRequest: no broadcast is awaited. Or a broadcast failed; then the group is
                forgotten, because it is unknown what the other ranks have received.
        """
        reception = self._reception(name)
        if not reception.is_done:
            return False
        if reception.received is None:
            self._members[name].is_broken = True
            self._forget(name)
            raise InvalidRequest(
                f"A broadcast of the group {name!r} failed, and the group with it: "
                f"{reception.error}"
            )
        return True

    def take(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the received tensors with their names, and forget them here.

        Raises:
            InvalidRequest: not all tensors have come, or no broadcast is awaited.
        """
        received = self._reception(name).received
        if received is None:
            raise InvalidRequest(f"Not everything has come from the group {name!r}.")
        self._members[name].reception = None
        return received

    def _reception(self, name: str) -> _Reception:
        reception = self._member(name).reception
        if reception is None:
            raise InvalidRequest(f"The group {name!r} awaits no broadcast.")
        return reception

    def _receive(self, member: _Member, reception: _Reception, request: ReceiveTensors) -> None:
        try:
            self._set_device()
            reception.received = self._receive_all(member, request)
            if self._device.type == "cuda":
                # Another thread uses the tensors on its own stream, so they must be complete.
                torch.cuda.current_stream().synchronize()
        # Any error of the library is reported to the client and does not end the process.
        except Exception as error:
            reception.received, reception.error = None, first_line(error)
        finally:
            reception.is_done = True

    def _receive_all(self, member: _Member, request: ReceiveTensors) -> list[tuple[str, Tensor]]:
        device = self._device if member.backend == "nccl" else torch.device("cpu")
        if request.flattened:
            return list(self._receive_flat(member, request, device))
        received = []
        for spec in request.tensors:
            tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
            self._broadcast(tensor, member, request.timeout_s)
            received.append((spec.name, tensor))
        return received

    def _receive_flat(
        self, member: _Member, request: ReceiveTensors, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        sizes = [size_bytes(spec) for spec in request.tensors]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._broadcast(flat, member, request.timeout_s)
        start = 0
        for spec, size in zip(request.tensors, sizes, strict=True):
            yield spec.name, tensor_at(flat, start, spec)
            start += size

    @staticmethod
    def _broadcast(tensor: Tensor, member: _Member, timeout_s: float) -> None:
        options = dist.BroadcastOptions()
        # The broadcast gets a timeout too, so that an abandoned one does not keep the group from
        # ending. NCCL's is longer than this method's wait, because its watchdog ends the process.
        options.timeout = timedelta(seconds=timeout_s * (2 if member.backend == "nccl" else 1))
        work = member.group.broadcast([tensor], options)
        deadline = time.monotonic() + timeout_s
        too_late = TimeoutError(f"nothing came for {timeout_s:g} s")
        while not work.is_completed():
            if member.is_left:
                raise RuntimeError("the group was destroyed")
            if time.monotonic() > deadline:
                raise too_late
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            # Gloo's timeout may expire just before this method's.
            if "Timed out" in str(error):
                raise too_late from error
            raise

    def _member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            known = ", ".join(map(repr, self._members)) or "none"
            raise InvalidRequest(f"There is no group {name!r}; groups: {known}.")
        return member


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the stack that a library appends."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def size_bytes(spec: TensorSpec) -> int:
    """Return the number of bytes of a tensor."""
    return torch.Size(spec.shape).numel() * DTYPES[spec.dtype].itemsize


def tensor_at(flat: Tensor, start: int, spec: TensorSpec) -> Tensor:
    """Return the tensor at byte `start` of `flat`, `[size]` uint8; a copy if it is not aligned."""
    piece = flat[start : start + size_bytes(spec)]
    dtype = DTYPES[spec.dtype]
    if start % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(spec.shape)


class _interface_for:  # a context manager, used like a function
    """Lets a group reach another machine, even if the ranks' own group is bound to loopback.

    Libraries read their interface from the environment, so it is changed while the block runs.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._saved: dict[str, str] = {}

    def __enter__(self) -> None:
        if _is_loopback(self._address):
            return
        for name in _INTERFACES:
            if os.environ.get(name) == "lo":
                self._saved[name] = os.environ.pop(name)

    def __exit__(self, *_: object) -> None:
        os.environ.update(self._saved)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
