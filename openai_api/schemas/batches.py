"""Requests and answers of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from runtime.requests.bounds import one_of, within

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# OpenAI's bounds of `metadata`, which is stored and returned with every batch: number of entries,
# characters of a name, characters of a value.
MAX_LABELS, MAX_LABEL_CHARS, MAX_LABELLED_CHARS = 16, 64, 512
ExpirySeconds = Annotated[int, within(MIN_EXPIRY_S, MAX_EXPIRY_S)]


class FileForm(msgspec.Struct, kw_only=True):
    """The form of `POST /v1/files`."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after_anchor: Literal["created_at"] | None = msgspec.field(
        default=None, name="expires_after[anchor]"
    )
    expires_after_seconds: ExpirySeconds | None = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """After how many seconds, counted from a file's creation, the file expires."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/batches`; every line of the input file must be for `endpoint`."""

    input_file_id: str
    endpoint: Annotated[str, one_of(*ENDPOINTS)]
    completion_window: Annotated[str, one_of("24h")]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


DECODER = msgspec.json.Decoder(BatchRequest)


class FileObject(TypedDict):
    """The description of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: NotRequired[int]
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """The answer to a deletion."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorBody(TypedDict):
    """An error in the input of a batch; `line` is the line's number, from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    """The errors in the input of a batch, up to a maximum number."""

    object: Literal["list"]
    data: list[BatchErrorBody]


class RequestCounts(TypedDict):
    """Numbers of lines: all, answered successfully, and failed."""

    total: int
    completed: int
    failed: int


class BatchUsage(TypedDict):
    """Token counts of all answers so far."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchObject(TypedDict):
    """A batch. Times are Unix times in seconds; null if the event has not happened."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, Any] | None


class BatchList(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
