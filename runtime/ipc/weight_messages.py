"""Messages about weights, pausing and memory: the front's calls, and what each rank is told.

Tensors cross processes as safetensors bytes, as names of shared memory or as CUDA handles.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
# A broadcast that has not come by then never will; a group can be told to wait for less.
BROADCAST_TIMEOUT_S = 300.0
# Both sides are started for this; a trainer that is not there is a wrong address.
JOIN_TIMEOUT_S = 30.0
CheckAction = Literal["snapshot", "reset_tensors", "compare", "checksum"]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor that is to come.

    Attributes:
        dtype: `float32`, `float16`, `bfloat16` or `float64`.
    """

    name: str
    dtype: str
    shape: list[int]


class CudaHandle(msgspec.Struct, frozen=True, gc=False):
    """CUDA memory of another process of this machine, and the tensors in it.

    What `torch.UntypedStorage._share_cuda_` gives, with the device named by its UUID: processes
    number their devices differently. The JSON form of a body has the bytes in base64.

    Attributes:
        device_uuid: as `nvidia-smi -L` prints it.
        handle: of the whole allocation.
        storage_size_bytes, storage_offset_bytes: where the storage lies in it.
        ref_counter_handle, ref_counter_offset: by which the owner learns that we are done.
        event_handle, event_sync_required: what to wait for before reading.
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


# ---- what every rank does; rank 0 passes it on ---------------------------------------------------


class LoadFolder(_Message, frozen=True):
    """Replace all weights by those of a local folder."""

    folder: str


class LoadDummy(_Message, frozen=True):
    """Replace all weights by seeded random numbers."""

    seed: int


class LoadTensors(_Message, frozen=True):
    """Replace some weights: whole tensors, as the bytes of safetensors files.

    Attributes:
        files: one for all ranks, or one for each.
    """

    files: list[bytes]


class LoadSharedMemory(_Message, frozen=True):
    """Replace some weights: a safetensors file in POSIX shared memory, by its name."""

    name: str


class LoadCuda(_Message, frozen=True):
    """Replace some weights from CUDA memory of a trainer; one list for all ranks, or one each."""

    handles: list[list[CudaHandle]]


class JoinGroup(_Message, frozen=True):
    """Begin to meet a trainer; `GroupStatus` says when it is done. This rank's is `rank_offset` +
    its own.
    """  # noqa: D205  # one sentence

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float = JOIN_TIMEOUT_S


class GroupStatus(_Message, frozen=True):
    """Ask whether a group is joined; not yet while the answer's message is empty."""

    group_name: str


class LeaveGroup(_Message, frozen=True):
    """Forget a group."""

    group_name: str


class ReceiveTensors(_Message, frozen=True):
    """Begin to take tensors that rank 0 of a group broadcasts, in order; `ReceiveStatus` says when
    all have come, `LoadReceived` makes them the weights.

    Attributes:
        flattened: all of them come as one tensor of bytes instead.
        timeout_s: for each broadcast.
    """  # noqa: D205  # one sentence

    group_name: str
    tensors: list[TensorSpec]
    flattened: bool = False
    timeout_s: float = BROADCAST_TIMEOUT_S


class ReceiveStatus(_Message, frozen=True):
    """Ask whether a group's tensors have come; not yet while the answer's message is empty."""

    group_name: str


class LoadReceived(_Message, frozen=True):
    """Replace some weights by what has come from a group."""

    group_name: str


class KeepUpdate(_Message, frozen=True):
    """Every rank has loaded: what was kept for going back may go."""


class UndoUpdate(_Message, frozen=True):
    """Some rank failed: take back what was loaded since the last `KeepUpdate`."""


class ReadWeight(_Message, frozen=True):
    """Give a weight's first `num_rows` rows as an encoded `WeightPart`."""

    name: str
    num_rows: int


class CheckWeights(_Message, frozen=True):
    """A trainer's tests: remember, destroy, compare, or sum up the weights."""

    action: CheckAction


class ReleaseMemory(_Message, frozen=True):
    """Give the device's memory back, by tag."""

    tags: list[MemoryTag]


class ResumeMemory(_Message, frozen=True):
    """Take it again; weights come back as they were."""

    tags: list[MemoryTag]


class RestoreGraphs(_Message, frozen=True):
    """Capture CUDA graphs where some are missing; every rank has its memory.

    An operation of its own: ranks capture together, and none may wait for one that has failed.
    """


WeightUpdate = LoadFolder | LoadDummy | LoadTensors | LoadSharedMemory | LoadCuda | LoadReceived
GroupOp = JoinGroup | LeaveGroup | GroupStatus | ReceiveTensors | ReceiveStatus
WeightOp = (
    WeightUpdate
    | GroupOp
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
        shape: of `data`.
        shard_dim: dimension cut among ranks; `None` for a part that is the whole.
        start: of this part along `shard_dim`.
        whole_len: of the whole along `shard_dim`, among the rows that were asked for.
        data: float32 bytes.
        num_blocks: see `WeightShard`; of several, all rows are there, whatever was asked for.
    """

    shape: list[int]
    shard_dim: int | None
    start: int
    whole_len: int
    data: bytes
    num_blocks: int = 1


class RankCall(_Message, frozen=True):
    """Rank 0 to each other rank."""

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
        retract: put running requests back to wait, so that their pages can be freed; else they
            keep rows and pages.
    """

    call_id: int
    retract: bool


class ContinueGeneration(_Message, frozen=True):
    """Go on after a pause; harmless when there is none."""

    call_id: int


class InvalidateCache(_Message, frozen=True):
    """Let no later request find a prefix computed so far; requests may be running."""

    call_id: int
