"""Messages about weights, pauses and memory: calls of the front process, and commands to ranks.

Tensors are sent as safetensors bytes, as names of shared memory, or as CUDA handles.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
# Default time to wait for a broadcast, seconds.
BROADCAST_TIMEOUT_S = 300.0
# Time to wait for a trainer that joins a group, seconds. Both sides are ready then, so a trainer
# that does not answer means a wrong address.
JOIN_TIMEOUT_S = 30.0
CheckAction = Literal["snapshot", "reset_tensors", "compare", "checksum"]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name, type and shape of a tensor that is to be received.

    Attributes:
        dtype: `float32`, `float16`, `bfloat16` or `float64`.
    """

    name: str
    dtype: str
    shape: list[int]


class CudaHandle(msgspec.Struct, frozen=True, gc=False):
    """A handle to CUDA memory of another process on this machine, and the tensors in it.

    This is the result of `torch.UntypedStorage._share_cuda_`. The device is named by its UUID,
    because processes may number devices differently. In JSON, bytes are encoded as base64.

    Attributes:
        device_uuid: UUID of the device, as `nvidia-smi -L` prints it.
        handle: CUDA IPC handle of the whole allocation.
        storage_size_bytes: size of the storage.
        storage_offset_bytes: offset of the storage in the allocation.
        ref_counter_handle, ref_counter_offset: a counter that tells the owner when the receiver no
            longer uses the memory.
        event_handle, event_sync_required: a CUDA event to wait for before reading.
        tensors: the tensors, each with its offset in bytes from the beginning of the storage.
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
    """Tells every rank to replace all weights by those of a local folder."""

    folder: str


class LoadDummy(_Message, frozen=True):
    """Tells every rank to replace all weights by random numbers, drawn with a seed."""

    seed: int


class LoadTensors(_Message, frozen=True):
    """Tells every rank to replace some weights by whole tensors, sent as safetensors bytes.

    Attributes:
        files: the bytes of one file for all ranks, or of one file for each rank.
    """

    files: list[bytes]


class LoadSharedMemory(_Message, frozen=True):
    """Tells every rank to replace some weights by a safetensors file in shared memory `name`."""

    name: str


class LoadCuda(_Message, frozen=True):
    """Tells every rank to replace some weights by tensors in a trainer's CUDA memory.

    `handles` has one list for all ranks, or one list for each rank.
    """

    handles: list[list[CudaHandle]]


class JoinGroup(_Message, frozen=True):
    """Tells every rank to start joining a trainer's process group; `GroupStatus` asks if it has.

    In the group, a rank has the number `rank_offset` plus its own number.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float = JOIN_TIMEOUT_S


class GroupStatus(_Message, frozen=True):
    """Asks whether a process group is joined; the reply's message is empty until it is."""

    group_name: str


class LeaveGroup(_Message, frozen=True):
    """Tells every rank to leave a process group."""

    group_name: str


class ReceiveTensors(_Message, frozen=True):
    """Tells every rank to start receiving tensors that rank 0 of a group broadcasts, in order.

    `ReceiveStatus` asks whether all were received. `LoadReceived` then loads them as weights.

    Attributes:
        group_name: the process group.
        tensors: the tensors to receive.
        flattened: whether all tensors come as a single tensor of bytes.
        timeout_s: time to wait for each broadcast, seconds.
    """

    group_name: str
    tensors: list[TensorSpec]
    flattened: bool = False
    timeout_s: float = BROADCAST_TIMEOUT_S


class ReceiveStatus(_Message, frozen=True):
    """Asks whether a group's tensors were received; the reply's message is empty until then."""

    group_name: str


class LoadReceived(_Message, frozen=True):
    """Tells every rank to replace some weights by the tensors received from a process group."""

    group_name: str


class LoadAdapter(_Message, frozen=True):
    """Tells every rank to read a LoRA adapter, which the front process checked, into host memory.

    Attributes:
        adapter_id: number of the adapter, which no other adapter ever gets.
        folder: local folder with the adapter, as PEFT writes it.
        is_pinned: whether the adapter stays in device memory once it was copied there.
        in_background: whether steps continue meanwhile. `AdapterStatus` then tells when the adapter
            is loaded.
    """

    adapter_id: int
    folder: str
    is_pinned: bool = False
    in_background: bool = False


class AdapterStatus(_Message, frozen=True):
    """Asks every rank whether an adapter is loaded; the reply's message is empty until it is."""

    adapter_id: int
    is_pinned: bool = False


class UnloadAdapter(_Message, frozen=True):
    """Tells every rank to remove an adapter; refused while a request uses the adapter."""

    adapter_id: int


class KeepUpdate(_Message, frozen=True):
    """Tells a rank to free its copies of the old weights: all ranks have loaded the new ones."""


class UndoUpdate(_Message, frozen=True):
    """Tells a rank to restore the weights of the last `KeepUpdate`, because a rank has failed."""


class ReadWeight(_Message, frozen=True):
    """Asks every rank for the first `num_rows` rows of a weight, as an encoded `WeightPart`."""

    name: str
    num_rows: int


class CheckWeights(_Message, frozen=True):
    """Tells every rank to check its weights, so that a trainer can test its updates.

    Attributes:
        action: `snapshot` stores a copy of all weights, `reset_tensors` fills the weights with
            noise, `compare` compares them with the copy, `checksum` returns a checksum.
    """

    action: CheckAction


class ReleaseMemory(_Message, frozen=True):
    """Tells every rank to release the device memory that the tags name."""

    tags: list[MemoryTag]


class ResumeMemory(_Message, frozen=True):
    """Tells every rank to allocate released memory again; weights get their values back."""

    tags: list[MemoryTag]


class RestoreGraphs(_Message, frozen=True):
    """Tells every rank to capture missing CUDA graphs; the memory of all ranks must be allocated.

    The ranks capture graphs together and wait for each other. So this is a separate operation,
    which is sent only if all ranks could allocate their other memory.
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
    """Rows of a weight, of one rank or of all ranks together.

    Attributes:
        shape: shape of `data`.
        shard_dim: dimension in which the weight is divided among ranks; `None` if `data` is the
            whole weight.
        start: position of this part in `shard_dim`.
        whole_len: length of the whole weight in `shard_dim`, within the requested rows.
        data: float32 bytes.
        num_blocks: number of projections of equal size that are stacked along `shard_dim`; the rank
            has a part of each. If there are several, all rows are included.
        spans: rows of each span, if the rank has a part of several spans of rows. If there are any,
            all rows are included.
        num_parts: number of equal parts of each span; see `WeightShard.num_parts`.
    """

    shape: list[int]
    shard_dim: int | None
    start: int
    whole_len: int
    data: bytes
    num_blocks: int = 1
    spans: list[int] = []
    num_parts: list[int] = []


class RankCall(_Message, frozen=True):
    """A command from rank 0 to each other rank."""

    op: WeightOp


class RankReply(_Message, frozen=True):
    """A rank's reply to a `RankCall`."""

    rank: int
    success: bool
    message: str = ""
    data: bytes = b""


# ---- front -> scheduler --------------------------------------------------------------------------


class WeightCall(_Message, frozen=True):
    """Tells the scheduler to run an operation on all ranks between two steps.

    Attributes:
        flush_cache: whether to empty the prefix cache too.
    """

    call_id: int
    op: WeightOp
    flush_cache: bool = False


class PauseGeneration(_Message, frozen=True):
    """Tells the scheduler to compute no further steps until `ContinueGeneration`.

    Attributes:
        retract: put running requests back into the queue and free their pages; otherwise they keep
            their pages.
    """

    call_id: int
    retract: bool


class ContinueGeneration(_Message, frozen=True):
    """Tells the scheduler to end a pause of generation; does nothing without one."""

    call_id: int


class InvalidateCache(_Message, frozen=True):
    """Tells the scheduler to hide all cached prefixes from later requests.

    Requests may be running meanwhile.
    """

    call_id: int
