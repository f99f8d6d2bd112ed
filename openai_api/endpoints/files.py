"""`/v1/files`: the input files of batches, and the files with their answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from openai_api.batches.batch_service import BatchService
from openai_api.batches.file_store import INPUT, UnknownFile
from openai_api.batches.multipart import MAX_FILENAME_CHARS, Form, Upload, read_form
from openai_api.batches.pages import Page
from openai_api.call import Call, FileContent, Whole
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.batches import MAX_EXPIRY_S, MIN_EXPIRY_S
from runtime.client.tenant import TENANT
from runtime.errors import InvalidRequest

_MOST_LISTED = 10_000
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


def batch_service(context: OpenAIContext) -> BatchService:
    """Return the stores of files and batches.

    Raises:
        InvalidRequest: the server was started with `--file-store-mb 0`.
    """
    if context.batch_service is None:
        raise InvalidRequest("This server stores no files: --file-store-mb is 0.")
    return context.batch_service


async def upload_file(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/files`: store an uploaded file."""
    service = batch_service(context)
    form = await asyncio.to_thread(read_form, call.body, call.content_type)
    upload = _checked(form)
    file = await service.files.add(
        upload.content, upload.filename, TENANT.get(), _expiry_s(form.fields)
    )
    return Whole(file.wire())


async def list_files(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/files`: list the files."""
    service = batch_service(context)
    page = Page.asked(call.query, default=_MOST_LISTED, most=_MOST_LISTED)
    files = await service.files.page(TENANT.get(), page, call.query.get("purpose"))
    return Whole(page.answer([file.wire() for file in files]))


async def retrieve_file(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/files/{file_id}`: describe a file."""
    service = batch_service(context)
    return Whole((await service.files.get(call.path["file_id"], TENANT.get())).wire())


async def file_content(call: Call, context: OpenAIContext) -> FileContent:
    """Answer `GET /v1/files/{file_id}/content`: send a file's content."""
    service = batch_service(context)
    file = await service.files.get(call.path["file_id"], TENANT.get())
    try:
        opened = await asyncio.to_thread(service.files.path(file.id).open, "rb")
    except FileNotFoundError:
        raise UnknownFile(f"No such File object: {file.id}") from None
    return FileContent(opened, file.bytes)


async def delete_file(call: Call, context: OpenAIContext) -> Whole:
    """Answer `DELETE /v1/files/{file_id}`: delete a file.

    Raises:
        InvalidRequest: an unfinished batch needs the file.
    """
    service = batch_service(context)
    file = await service.files.get(call.path["file_id"], TENANT.get())
    for record in service.runner.running.values():
        if record.input_file_id == file.id:
            raise InvalidRequest(f"{record.id} still reads this file; cancel it first.")
    await service.files.delete(file.id)
    return Whole({"id": file.id, "object": "file", "deleted": True})


def _checked(form: Form) -> Upload:
    unknown = sorted((form.fields.keys() - _FIELDS) | (form.files.keys() - {"file"}))
    if unknown:
        name = unknown[0][:64]
        raise InvalidRequest(f"The form has no field {name!r}.", param=name)
    purpose = form.fields.get("purpose")
    if purpose != INPUT:
        raise InvalidRequest(
            f"purpose must be {INPUT}, got {str(purpose)[:64]!r}: files are the input of batches.",
            param="purpose",
        )
    upload = form.files.get("file")
    if upload is None:
        raise InvalidRequest("file must be given, with a filename.", param="file")
    if not 0 < len(upload.filename) <= MAX_FILENAME_CHARS or not upload.filename.isprintable():
        raise InvalidRequest(
            f"The filename must be 1 to {MAX_FILENAME_CHARS} printable characters.", param="file"
        )
    return upload


def _expiry_s(fields: dict[str, str]) -> int | None:
    given: dict[str, Any] = {name: fields.get(f"expires_after[{name}]") for name in _EXPIRY}
    if given["anchor"] is None and given["seconds"] is None:
        return None
    try:
        seconds = msgspec.convert(given["seconds"], int, strict=False)
    except msgspec.ValidationError:
        seconds = 0
    if given["anchor"] != "created_at" or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(
            "expires_after needs anchor created_at and seconds in "
            f"[{MIN_EXPIRY_S}, {MAX_EXPIRY_S}].",
            param="expires_after",
        )
    return seconds


_EXPIRY = ("anchor", "seconds")
