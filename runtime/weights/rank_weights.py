"""Executes operations on the weights and memory of one rank; all ranks run the same code.

An error becomes an unsuccessful reply, so no client can end the process.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec
import torch

from runtime.checkpoint.check import describe
from runtime.errors import HeadraceError, InvalidRequest, StartupError
from runtime.executor.device_errors import raise_if_lost
from runtime.executor.device_memory import DeviceMemory, give_back
from runtime.ipc.weight_messages import (
    MEMORY_TAGS,
    AdapterOp,
    AdapterStatus,
    CheckWeights,
    GroupOp,
    GroupStatus,
    JoinGroup,
    KeepUpdate,
    LeaveGroup,
    LoadAdapter,
    LoadCuda,
    LoadDummy,
    LoadFolder,
    LoadReceived,
    LoadSharedMemory,
    LoadTensors,
    MemoryTag,
    RankReply,
    ReadWeight,
    ReceiveStatus,
    ReceiveTensors,
    ReleaseMemory,
    RestoreGraphs,
    ResumeMemory,
    UndoUpdate,
    UnloadAdapter,
    WeightOp,
    WeightPart,
    WeightUpdate,
)
from runtime.weights.adapter_files import RankAdapters
from runtime.weights.incoming import Incoming, from_bytes, from_cuda, from_shared_memory
from runtime.weights.live_weights import LiveWeights
from runtime.weights.update_group import UpdateGroups

logger = logging.getLogger(__name__)

JOINED, RECEIVED = "joined", "received"


class RankWeights:
    """Executes operations on weights, on one rank."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        weights: LiveWeights,
        memory: DeviceMemory,
        beat: Callable[[], None],
        adapters: RankAdapters | None = None,
    ) -> None:
        """Prepare to change `weights` and `memory`.

        Args:
            rank: the rank's number.
            device: the rank's device.
            weights: the rank's weights.
            memory: the rank's KV pool and CUDA graphs.
            beat: called often during an operation, to show that the process is alive.
            adapters: loads adapters; `None` if adapters are off.
        """
        self._adapters = adapters
        self._rank = rank
        self._device = device
        self._weights = weights
        self._memory = memory
        self._groups = UpdateGroups(rank, device)
        self._beat = beat

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV pool is allocated, so that steps can run."""
        return not (self._weights.are_released or self._memory.kv_is_released)

    def run(self, op: WeightOp) -> RankReply:
        """Execute an operation; a failure becomes an unsuccessful reply that says why.

        Raises:
            DeviceLost: the device has failed for good.
        """
        self._memory.forget_recordings()
        try:
            message, data = self._run(op)
        except HeadraceError as error:
            return RankReply(self._rank, False, error.message)
        except (MemoryError, torch.OutOfMemoryError) as error:
            give_back()
            return RankReply(self._rank, False, f"Not enough memory: {str(error).splitlines()[0]}")
        except Exception as error:
            raise_if_lost(error)
            logger.exception("%s failed", type(op).__name__)
            return RankReply(self._rank, False, f"{type(error).__name__}: {error}")
        return RankReply(self._rank, True, message, data)

    def _run(self, op: WeightOp) -> tuple[str, bytes]:
        match op:
            case KeepUpdate():
                self._weights.keep()
            case UndoUpdate():
                self._undo()
            case ReadWeight():
                return "", self._read(op)
            case CheckWeights():
                return self._check(op), b""
            case JoinGroup() | LeaveGroup() | GroupStatus() | ReceiveTensors() | ReceiveStatus():
                return self._in_group(op), b""
            case LoadAdapter() | AdapterStatus() | UnloadAdapter():
                return self._change_adapters(op), b""
            case ReleaseMemory():
                self._release(op.tags)
            case ResumeMemory():
                self._resume(op.tags)
            case RestoreGraphs():
                self._memory.restore_graphs(self._beat)
            case _:
                self._update(op)
        return "", b""

    def _change_adapters(self, op: AdapterOp) -> str:
        if self._adapters is None:
            raise InvalidRequest("This server was started without --enable-lora.")
        return self._adapters.change(op)

    def _in_group(self, op: GroupOp) -> str:
        match op:
            case JoinGroup():
                self._groups.join(op)
            case LeaveGroup():
                self._groups.leave(op.group_name)
            case GroupStatus():
                return JOINED if self._groups.is_joined(op.group_name) else ""
            case ReceiveTensors():
                self._weights.check({spec.name: spec.shape for spec in op.tensors})
                self._groups.receive(op)
            case ReceiveStatus():
                return RECEIVED if self._groups.is_received(op.group_name) else ""
            case _:
                assert_never(op)
        return ""

    def _update(self, op: WeightUpdate) -> None:
        match op:
            case LoadFolder():
                self._weights.load_folder(Path(op.folder))
            case LoadDummy():
                self._weights.load_dummy(op.seed)
            case LoadTensors():
                mine = op.files[self._rank if len(op.files) > 1 else 0]
                self._load(from_bytes(mine))
            case LoadSharedMemory():
                self._load(from_shared_memory(op.name))
            case LoadCuda():
                handles = op.handles[self._rank if len(op.handles) > 1 else 0]
                self._load(from_cuda(handles, self._device))
            case LoadReceived():
                received = self._groups.take(op.group_name)
                shapes = {name: list(tensor.shape) for name, tensor in received}
                self._load(Incoming(shapes, iter(received)))
            case _:
                assert_never(op)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _load(self, incoming: Incoming) -> None:
        self._weights.load_tensors(incoming.shapes, incoming.tensors)

    def _undo(self) -> None:
        self._weights.undo()
        if self._weights.are_released:
            give_back()

    def _read(self, op: ReadWeight) -> bytes:
        found = self._weights.read(op.name, op.num_rows)
        if found is None:
            return b""
        part, shard = found
        whole_len = 0
        if shard.shard_dim is not None:
            whole_len = shard.shape[shard.shard_dim]
            if shard.shard_dim == 0:
                whole_len = min(whole_len, op.num_rows)
        return msgspec.msgpack.encode(
            WeightPart(
                shape=list(part.shape),
                shard_dim=shard.shard_dim,
                start=shard.start,
                whole_len=whole_len,
                data=part.numpy().tobytes(),
                num_blocks=shard.num_blocks,
                spans=list(shard.spans),
                num_parts=list(shard.num_parts),
            )
        )

    def _check(self, op: CheckWeights) -> str:
        match op.action:
            case "snapshot":
                self._weights.snapshot()
                return "Snapshot taken."
            case "reset_tensors":
                self._weights.destroy()
                return "Every weight is overwritten with noise."
            case "compare":
                different = self._weights.differences()
                if different:
                    raise InvalidRequest(f"{describe('different from the snapshot', different)}.")
                return "Every weight is that of the snapshot."
            case "checksum":
                digests = self._weights.digests()
                lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
                return hashlib.sha256(lines.encode()).hexdigest()
            case _:
                assert_never(op.action)

    def _release(self, tags: list[MemoryTag]) -> None:
        wanted = tags or MEMORY_TAGS
        # The weights are released first, because there may be too little memory for their copy.
        if "weights" in wanted and not self._weights.are_released:
            self._weights.release()
            self._memory.release_graphs()
        if "kv_cache" in wanted:
            self._memory.release_kv()
        if "cuda_graph" in wanted:
            self._memory.release_graphs()
        give_back()

    def _resume(self, tags: list[MemoryTag]) -> None:
        wanted = tags or MEMORY_TAGS
        try:
            if "weights" in wanted:
                self._weights.restore()
            if "kv_cache" in wanted:
                self._memory.restore_kv()
        except StartupError as error:
            raise InvalidRequest(f"The weights cannot be read again: {error.message}") from error
