"""Messages about weights, pausing and memory: the front's calls, and the commands to ranks.

Tensors cross processes as safetensors bytes, as names of shared memory or as CUDA handles.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
# A broadcast that has not come by then will not come; a message can set a shorter time.
BROADCAST_TIMEOUT_S = 300.0
# Both sides are started for this; a trainer that does not answer means a wrong address.
JOIN_TIMEOUT_S = 30.0
CheckAction = Literal["snapshot", "reset_tensors", "compare", "checksum"]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor to be received.

    Attributes:
        dtype: `float32`, `float16`, `bfloat16` or `float64`.
    """

    name: str
    dtype: str
    shape: list[int]


class CudaHandle(msgspec.Struct, frozen=True, gc=False):
    """CUDA memory of another process of this machine, and the tensors in it.

    The result of `torch.UntypedStorage._share_cuda_`, but with the device's UUID, as processes
    number their devices differently. In JSON the bytes are base64.

    Attributes:
        device_uuid: the device's UUID, as `nvidia-smi -L` prints it.
        handle: the CUDA IPC handle of the whole allocation.
        storage_size_bytes, storage_offset_bytes: size of the storage, and its offset in the
            allocation.
        ref_counter_handle, ref_counter_offset: counter that shows the owner that we are done.
        event_handle, event_sync_required: event to wait for before reading.
        tensors: each with its offset in bytes from the storage's beginning.
    """

    device_uuid: str
    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    tensors: list[tuple[TensorSpec, int]]


# ---- commands for every rank; rank 0 forwards them -----------------------------------------------


class LoadFolder(_Message, frozen=True):
    """Replace all weights with those of a local folder."""

    folder: str


class LoadDummy(_Message, frozen=True):
    """Replace all weights with seeded random numbers."""

    seed: int


class LoadTensors(_Message, frozen=True):
    """Replace some weights: whole tensors, as the bytes of safetensors files.

    Attributes:
        files: bytes of one file for all ranks, or of one file for each rank.
    """

    files: list[bytes]


class LoadSharedMemory(_Message, frozen=True):
    """Replace some weights: a safetensors file in POSIX shared memory, by its name."""

    name: str


class LoadCuda(_Message, frozen=True):
    """Replace some weights from a trainer's CUDA memory.

    `handles` has one list for all ranks, or one list for each rank.
    """

    handles: list[list[CudaHandle]]


class JoinGroup(_Message, frozen=True):
    """Begin to join a trainer's group; `GroupStatus` reports when it is done.

    This rank's number in the group is `rank_offset` plus its own.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float = JOIN_TIMEOUT_S


class GroupStatus(_Message, frozen=True):
    """Ask whether a group is joined; the answer's message is empty until it is."""

    group_name: str


class LeaveGroup(_Message, frozen=True):
    """Forget a group."""

    group_name: str


class ReceiveTensors(_Message, frozen=True):
    """Begin to receive tensors that rank 0 of a group broadcasts, in order.

    `ReceiveStatus` reports when all have been received; `LoadReceived` loads them as weights.

    Attributes:
        flattened: whether the tensors come as one tensor of bytes instead.
        timeout_s: seconds for each broadcast.
    """

    group_name: str
    tensors: list[TensorSpec]
    flattened: bool = False
    timeout_s: float = BROADCAST_TIMEOUT_S


class ReceiveStatus(_Message, frozen=True):
    """Ask whether a group's tensors have been received; the answer is empty until they are."""

    group_name: str


class LoadReceived(_Message, frozen=True):
    """Replace some weights with the tensors received from a group."""

    group_name: str


class LoadAdapter(_Message, frozen=True):
    """Read an adapter (LoRA), which the front has checked, into host memory.

    Attributes:
        adapter_id: a number that no other adapter ever gets.
        folder: a folder on this machine, as PEFT writes it.
        is_pinned: whether it keeps its slot on the device once it has one.
        in_background: whether steps go on meanwhile; `AdapterStatus` then reports when the adapter
            is loaded.
    """

    adapter_id: int
    folder: str
    is_pinned: bool = False
    in_background: bool = False


class AdapterStatus(_Message, frozen=True):
    """Ask whether an adapter is loaded; the answer's message is empty until it is."""

    adapter_id: int
    is_pinned: bool = False


class UnloadAdapter(_Message, frozen=True):
    """Forget an adapter; no request uses it."""

    adapter_id: int


class KeepUpdate(_Message, frozen=True):
    """Free the copies for undoing the update, because every rank has loaded it."""


class UndoUpdate(_Message, frozen=True):
    """Undo all loads since the last `KeepUpdate`, because a rank failed."""


class ReadWeight(_Message, frozen=True):
    """Return a weight's first `num_rows` rows as an encoded `WeightPart`."""

    name: str
    num_rows: int


class CheckWeights(_Message, frozen=True):
    """A trainer's tests: snapshot, overwrite, compare, or checksum the weights."""

    action: CheckAction


class ReleaseMemory(_Message, frozen=True):
    """Release device memory, by tag."""

    tags: list[MemoryTag]


class ResumeMemory(_Message, frozen=True):
    """Allocate released memory again; weights are restored."""

    tags: list[MemoryTag]


class RestoreGraphs(_Message, frozen=True):
    """Capture missing CUDA graphs; every rank must have its memory.

    Capturing is a separate operation because ranks capture together: no rank may wait for a failed
    rank.
    """


WeightUpdate = LoadFolder | LoadDummy | LoadTensors | LoadSharedMemory | LoadCuda | LoadReceived
AdapterOp = LoadAdapter | AdapterStatus | UnloadAdapter
GroupOp = JoinGroup | LeaveGroup | GroupStatus | ReceiveTensors | ReceiveStatus
WeightOp = (
    WeightUpdate
    | GroupOp
    | AdapterOp
    | KeepUpdate
    | UndoUpdate
    | ReadWeight
    | CheckWeights
    | ReleaseMemory
    | ResumeMemory
    | RestoreGraphs
)


class WeightPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a weight, of one rank or of all.

    Attributes:
        shape: the shape of `data`.
        shard_dim: dimension that is sharded among ranks; `None` when `data` is the whole weight.
        start: where this part starts along `shard_dim`.
        whole_len: length of the whole weight along `shard_dim`, within the requested rows.
        data: float32 bytes.
        num_blocks: number of blocks, see `WeightShard`; if there are several blocks, all rows are
            returned.
        spans: see `WeightShard`; if there are any, all rows are returned.
    """

    shape: list[int]
    shard_dim: int | None
    start: int
    whole_len: int
    data: bytes
    num_blocks: int = 1
    spans: list[int] = []


class RankCall(_Message, frozen=True):
    """A command from rank 0 to each other rank."""

    op: WeightOp


class RankReply(_Message, frozen=True):
    """A rank's answer to a `RankCall`."""

    rank: int
    success: bool
    message: str = ""
    data: bytes = b""


# ---- front -> scheduler --------------------------------------------------------------------------


class WeightCall(_Message, frozen=True):
    """Do `op` on every rank, between two steps; `flush_cache` drops cached prefixes afterwards."""

    call_id: int
    op: WeightOp
    flush_cache: bool = False


class PauseGeneration(_Message, frozen=True):
    """Compute no more steps until `ContinueGeneration`.

    Attributes:
        retract: move running requests back to the queue, so that their pages can be freed;
            otherwise they keep rows and pages.
    """

    call_id: int
    retract: bool


class ContinueGeneration(_Message, frozen=True):
    """Continue after a pause; does nothing without one."""

    call_id: int


class InvalidateCache(_Message, frozen=True):
    """Make all prefixes computed so far invisible to later requests; requests may be running."""

    call_id: int
