"""`/v1/batches`: files of requests, which are answered while the server has room for them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from openai_api.batches.batch_service import BatchService
from openai_api.batches.batch_store import OVER, BatchRecord, new_batch_id
from openai_api.batches.file_store import INPUT
from openai_api.batches.pages import Page
from openai_api.call import Call, Whole
from openai_api.endpoints.files import batch_service
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.schemas.batches import (
    DECODER,
    ENDPOINTS,
    MAX_EXPIRY_S,
    MAX_LABEL_CHARS,
    MAX_LABELLED_CHARS,
    MAX_LABELS,
    MIN_EXPIRY_S,
    BatchRequest,
)
from runtime.client.tenant import TENANT
from runtime.errors import EngineDead, InvalidRequest

_LISTED, _MOST_LISTED = 20, 100
_TIMES = (
    *("in_progress", "finalizing", "completed", "failed", "expired"),
    *("cancelling", "cancelled"),
)


async def create_batch(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/batches`: create a batch."""
    request = await read_body(call, DECODER)
    _check(request)
    service = batch_service(context)
    file = await service.files.get(request.input_file_id, TENANT.get())
    if file.purpose != INPUT:
        raise InvalidRequest(f"{file.id} is not the input of a batch.", param="input_file_id")
    expires = request.output_expires_after
    record = BatchRecord(
        id=new_batch_id(),
        tenant=TENANT.get(),
        endpoint=request.endpoint,
        input_file_id=file.id,
        created_at=int(time.time()),
        metadata=request.metadata,
        output_expiry_s=None if expires is None else expires.seconds,
    )
    with service.runner.place():
        await service.files.check_room()
        await service.batches.put(record)
        wire = await _wire(record, service, context)
        service.runner.add(record)
    return Whole(wire)


async def retrieve_batch(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/batches/{batch_id}`: describe a batch."""
    service = batch_service(context)
    record = await service.batches.get(call.path["batch_id"], TENANT.get())
    return Whole(await _wire(record, service, context))


async def list_batches(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/batches`: list the batches."""
    service = batch_service(context)
    page = Page.asked(call.query, default=_LISTED, most=_MOST_LISTED)
    records = await service.batches.page(TENANT.get(), page)
    return Whole(page.answer([await _wire(record, service, context) for record in records]))


async def cancel_batch(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/batches/{batch_id}/cancel`: stop answering a batch's lines.

    Raises:
        InvalidRequest: the batch is over, or its answers are being written.
        EngineDead: the batch does not run, because the server is stopping or its disk is full.
    """
    service = batch_service(context)
    record = await service.batches.get(call.path["batch_id"], TENANT.get())
    running = service.runner.running.get(record.id)
    if running is None and record.status not in OVER:
        # Either the server has not yet begun to run an earlier server's batches, or the batch has
        # ended since it was read.
        await service.runner.has_begun.wait()
        record = await service.batches.get(record.id, TENANT.get())
        running = service.runner.running.get(record.id)
    # The status is checked again, because a finished batch stays in `running` for a moment.
    status = (running or record).status
    if status in (*OVER, "finalizing"):
        raise InvalidRequest(f"A batch that is {status} cannot be cancelled.")
    if running is None:
        raise EngineDead("This batch is not running at the moment; please try again.")
    await service.runner.cancel(running)
    return Whole(await _wire(running, service, context))


def _check(request: BatchRequest) -> None:
    if request.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    if request.completion_window != "24h":
        raise InvalidRequest("completion_window must be 24h.", param="completion_window")
    labels = request.metadata or {}
    if len(labels) > MAX_LABELS or any(
        len(name) > MAX_LABEL_CHARS or len(text) > MAX_LABELLED_CHARS
        for name, text in labels.items()
    ):
        raise InvalidRequest(
            f"metadata may have {MAX_LABELS} entries, their names {MAX_LABEL_CHARS} characters and "
            f"their texts {MAX_LABELLED_CHARS}.",
            param="metadata",
        )
    expires = request.output_expires_after
    if expires is not None and not MIN_EXPIRY_S <= expires.seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"output_expires_after.seconds must be in [{MIN_EXPIRY_S}, {MAX_EXPIRY_S}].",
            param="output_expires_after",
        )


async def _wire(
    record: BatchRecord, service: BatchService, context: OpenAIContext
) -> dict[str, Any]:
    counts = await service.batches.counts(record)
    errors = [msgspec.to_builtins(error) for error in record.errors]
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": context.service.served_model_name,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": record.status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{name}_at": record.times.get(name) for name in _TIMES},
        "request_counts": {
            "total": record.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": {
            "input_tokens": counts.input_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.input_tokens + counts.output_tokens,
        },
        "metadata": record.metadata,
    }
