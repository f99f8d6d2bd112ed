"""The request bodies of the routes that change weights, and their conversion to operations."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from runtime.checkpoint.check import describe
from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import (
    BROADCAST_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    CheckAction,
    CudaHandle,
    JoinGroup,
    LoadCuda,
    LoadSharedMemory,
    LoadTensors,
    MemoryTag,
    ReceiveTensors,
    TensorSpec,
    WeightPart,
)
from runtime.requests.bounds import one_of, within
from runtime.weights.weight_control import PauseMode

# The maximum number of numbers of a weight in one answer; encoding them takes tens of milliseconds.
MAX_NUMBERS_READ = 2**20
_DEFAULT_ROWS = 100
DEFAULT_GROUP = "weight_update_group"
MAX_PORT = 65535
_BACKENDS = ("nccl", "gloo")
_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn"),
    *("uint8", "int8", "int32", "int64"),
)
_ALLOWED = (
    "Send one of: serialized_named_tensors (base64 of the bytes of a safetensors file, one for all "
    "tensor-parallel ranks or one for each), shared_memory (the name of a safetensors file in "
    "/dev/shm), cuda_ipc (handles of CUDA memory). headrace.trainer makes each of them."
)

_ALLOWED_OF_ADAPTERS = (
    "Send base64 of the bytes of a safetensors file; headrace.trainer.adapter_body makes it."
)


class RestartBody(msgspec.Struct, kw_only=True):
    """The body of `/restart_worker`; by default, the new worker loads the present weights."""

    model_path: str | None = None
    weight_version: str | None = None


class VersionBody(msgspec.Struct, kw_only=True):
    """The body of `/update_weight_version`, which sets the label of the loaded weights."""

    new_version: str
    abort_all_requests: bool = True


class ByNameBody(msgspec.Struct, kw_only=True):
    """The body of `/get_weights_by_name`; `truncate_size` is the number of rows to send."""

    name: str
    truncate_size: Annotated[int, within(1)] | None = None


class CheckBody(msgspec.Struct, kw_only=True):
    """The body of `/weights_checker`, by which a trainer tests its updates."""

    action: CheckAction


class SessionBody(msgspec.Struct, kw_only=True):
    """The body of `/begin_weight_update`; `selector` has no effect, as there is only one model."""

    selector: Literal["all", "target"] | None = None


class PauseBody(msgspec.Struct, kw_only=True):
    """The body of `/pause_generation`; `mode` says what happens to running requests."""

    mode: PauseMode = "abort"


class ContinueBody(msgspec.Struct, kw_only=True):
    """The body of `/continue_generation`, which ends a pause; its only field has no effect."""

    torch_empty_cache: bool | None = None


class MemoryBody(msgspec.Struct, kw_only=True):
    """The body of `/release_memory_occupation` and `/resume_memory_occupation`.

    `tags` selects the kinds of device memory; by default all.
    """

    tags: list[MemoryTag] | None = None


class DiskBody(msgspec.Struct, kw_only=True):
    """The body of `/update_weights_from_disk`.

    `recapture_cuda_graph` has no effect, because weights are written in place, where the graphs
    read them.
    """

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    flush_cache: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    torch_empty_cache: bool | None = None
    token_step: int | None = None
    is_async: bool | None = None
    manifest: object | None = None


class TensorBody(msgspec.Struct, kw_only=True):
    """The body of `/update_weights_from_tensor`.

    Exactly one of the first three fields has the tensors: as bytes of safetensors files, as the
    name of shared memory, or as handles of CUDA memory.
    """

    serialized_named_tensors: list[bytes] | None = None
    shared_memory: str | None = None
    cuda_ipc: list[list[CudaHandle]] | None = None
    load_format: str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


class DistributedBody(msgspec.Struct, kw_only=True):
    """The body of `/update_weights_from_distributed`.

    It describes the tensors that a trainer then broadcasts to the process group `group_name`.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: str | None = None
    selector: str | None = None
    torch_empty_cache: bool | None = None
    timeout: Annotated[float, within(above=0, high=BROADCAST_TIMEOUT_S)] | None = None


class InitGroupBody(msgspec.Struct, kw_only=True):
    """The body of `/init_weights_update_group`: the process group of a trainer that ranks join."""

    master_address: str
    master_port: Annotated[int, within(1, MAX_PORT)]
    rank_offset: Annotated[int, within(1)]
    world_size: Annotated[int, within(2)]
    group_name: str = DEFAULT_GROUP
    backend: Annotated[str, one_of(*_BACKENDS)] = "nccl"
    timeout: float | None = None


class DestroyGroupBody(msgspec.Struct, kw_only=True):
    """The body of `/destroy_weights_update_group`, which makes the ranks leave a process group."""

    group_name: str = DEFAULT_GROUP


def check_disk(body: DiskBody) -> None:
    """Refuse a body with unsupported fields.

    Raises:
        InvalidRequest: a field is not supported; the message names it.
    """
    if body.is_async:
        raise InvalidRequest(
            "is_async is not supported: the answer comes when the weights are loaded.",
            param="is_async",
        )
    if body.manifest is not None:
        raise InvalidRequest("manifest is not supported; omit it.", param="manifest")


def to_tensors(body: TensorBody, num_ranks: int) -> LoadTensors | LoadSharedMemory | LoadCuda:
    """Return the operation that makes the ranks load a body's tensors.

    Raises:
        InvalidRequest: the body has tensors in none of the forms or in several, its bytes are not
            safetensors, or the number of entries is wrong.
    """
    if body.load_format not in (None, "direct", "auto", "safetensors"):
        raise InvalidRequest(
            f"load_format {body.load_format[:64]!r} is not supported; omit it. {_ALLOWED}",
            param="load_format",
        )
    given = [
        name
        for name in ("serialized_named_tensors", "shared_memory", "cuda_ipc")
        if getattr(body, name) is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(f"Exactly one form of tensors is needed. {_ALLOWED}")
    if body.shared_memory is not None:
        return LoadSharedMemory(body.shared_memory)
    if body.cuda_ipc is not None:
        _check_count("cuda_ipc", len(body.cuda_ipc), num_ranks)
        return LoadCuda(body.cuda_ipc)
    files = body.serialized_named_tensors or []
    _check_count("serialized_named_tensors", len(files), num_ranks)
    for index, data in enumerate(files):
        check_safetensors(f"serialized_named_tensors[{index}]", data, "serialized_named_tensors")
    return LoadTensors(files)


def _check_count(name: str, count: int, num_ranks: int) -> None:
    if count not in (1, num_ranks):
        wanted = "one entry" if num_ranks == 1 else f"one entry, or {num_ranks}: one for each rank"
        raise InvalidRequest(f"{name} must have {wanted}; it has {count}.", param=name)


def check_safetensors(where: str, data: bytes, param: str) -> None:
    """Check that bytes are a safetensors file; if not, the message says what to send.

    Args:
        where: path of the bytes in the request, for the message.
        data: the bytes.
        param: the request's field, for the error.

    Raises:
        InvalidRequest: the bytes are not a safetensors file.
    """
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) >= 9 and header_bytes <= len(data) - 8 and data[8:9] == b"{":
        return
    what = "is not a safetensors file"
    if data[:1] == b"\x80" and data[1:2] <= b"\x05":
        what = "is pickled, and nothing is unpickled here because that can run code"
    allowed = _ALLOWED if param == "serialized_named_tensors" else _ALLOWED_OF_ADAPTERS
    raise InvalidRequest(f"{where} {what}. {allowed}", param=param)


def to_receive(body: DistributedBody, model: ModelSpec) -> ReceiveTensors:
    """Return the operation that makes the ranks receive tensors.

    The request is checked here, before a rank starts to wait for a tensor.

    Raises:
        InvalidRequest: the lists differ in length, a name is unknown, or a shape or type is wrong.
    """
    if body.load_format not in (None, "auto", "flattened_bucket"):
        raise InvalidRequest(
            f"load_format {body.load_format[:64]!r} is not one of flattened_bucket, auto.",
            param="load_format",
        )
    if body.selector not in (None, "all", "target"):
        raise InvalidRequest(
            f"selector {body.selector[:64]!r} is not one of all, target: there is no draft model.",
            param="selector",
        )
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise InvalidRequest(
            f"names, dtypes and shapes must be of one length; they have {len(body.names)}, "
            f"{len(body.dtypes)} and {len(body.shapes)}."
        )
    if not body.names:
        raise InvalidRequest("names is empty: there is nothing to receive.", param="names")
    expected = {spec.name: spec for spec in model.weights}
    for alias, name in model.aliases.items():
        # Some trainers also send a tensor under its alias. It is received, but not loaded again.
        expected[alias] = expected[name]
    named = [model.canonical(name) for name in body.names]
    unknown = [name for name in named if name not in expected]
    wrong = [
        f"{name} is {shape}, expected {list(expected[name].shape)}"
        for name, shape in zip(named, body.shapes, strict=True)
        if name in expected and not expected[name].has_shape(shape)
    ]
    problems = [describe("unknown", unknown), describe("of the wrong shape", wrong)]
    if any(problems):
        raise InvalidRequest(f"{'; '.join(filter(None, problems))}.", param="names")
    dtypes = [dtype.removeprefix("torch.") for dtype in body.dtypes]
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise InvalidRequest(
                f"dtype {dtype[:64]!r} is not one of {', '.join(_DTYPES)}.", param="dtypes"
            )
    tensors = [
        TensorSpec(name, dtype, shape)
        for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True)
    ]
    timeout_s = _timeout_s(body.timeout, BROADCAST_TIMEOUT_S)
    is_flat = body.load_format == "flattened_bucket"
    return ReceiveTensors(body.group_name, tensors, is_flat, timeout_s)


def _timeout_s(given: float | None, default: float) -> float:
    timeout_s = default if given is None else given
    if not 0 < timeout_s <= BROADCAST_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout must be in (0, {BROADCAST_TIMEOUT_S:.0f}] seconds, got {given}.",
            param="timeout",
        )
    return timeout_s


def to_join(body: InitGroupBody, num_ranks: int) -> JoinGroup:
    """Return the operation that makes the ranks join a process group.

    Raises:
        InvalidRequest: a field is empty, or a number is out of range.
    """
    if body.backend not in _BACKENDS:
        raise InvalidRequest(
            f"backend {body.backend[:64]!r} is not one of {', '.join(_BACKENDS)}.", param="backend"
        )
    if not 1 <= body.master_port <= MAX_PORT:
        raise InvalidRequest(f"master_port must be in [1, {MAX_PORT}].", param="master_port")
    if not body.master_address or not body.group_name:
        raise InvalidRequest("master_address and group_name must not be empty.")
    last = body.rank_offset + num_ranks
    if body.rank_offset < 1 or last > body.world_size:
        raise InvalidRequest(
            f"Ranks {body.rank_offset} to {last - 1} of this engine do not fit a world of "
            f"{body.world_size}, whose rank 0 is the trainer.",
            param="rank_offset",
        )
    return JoinGroup(
        body.master_address,
        body.master_port,
        body.rank_offset,
        body.world_size,
        body.group_name,
        body.backend,
        _timeout_s(body.timeout, JOIN_TIMEOUT_S),
    )


def rows_to_read(body: ByNameBody, model: ModelSpec) -> int:
    """Return how many rows of a weight to send: by default 100, or fewer if rows are long.

    Raises:
        InvalidRequest: less than one row is requested, or more numbers than `MAX_NUMBERS_READ`.
    """
    shapes = {spec.name: spec.shape for spec in model.weights}
    # The name is looked up as in `LiveWeights.read`.
    shape = shapes.get(model.aliases.get(body.name, model.canonical(body.name)), (1,))
    row_len = math.prod(shape[1:])
    most = max(1, MAX_NUMBERS_READ // max(1, row_len))
    if body.truncate_size is None:
        return min(_DEFAULT_ROWS, most)
    # Rows beyond the end of the weight do not count.
    if body.truncate_size < 1 or min(body.truncate_size, shape[0]) > most:
        raise InvalidRequest(
            f"truncate_size must be in [1, {most}] for this weight, whose rows have {row_len} "
            f"numbers each, got {body.truncate_size}.",
            param="truncate_size",
        )
    return min(body.truncate_size, shape[0])


def read_weight(data: bytes) -> Any:
    """Return the numbers of an encoded `WeightPart` as nested lists."""
    part = msgspec.msgpack.decode(data, type=WeightPart)
    if not part.data:
        return []
    view = memoryview(part.data).cast("B")
    return view.cast("f", part.shape).tolist()
