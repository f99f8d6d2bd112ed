"""Health routes: liveness, readiness, progress of the start, and a probe that makes a token."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Literal, TypedDict

from starlette.responses import Response

from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.errors import HeadraceError
from runtime.ipc.messages import Ping
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.service.text_embeddings import vector_input
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.readiness import (
    ProgressReport,
    progress_report,
    why_not_alive,
    why_not_healthy,
    why_not_ready,
    why_waiting,
)


class NotAlive(TypedDict):
    """The answer of `/livez` if this process should be replaced."""

    alive: Literal[False]
    reason: str


class NoToken(TypedDict):
    """The answer of `/health_generate` if no token came."""

    ready: Literal[False]
    reason: str


HEALTH = operation(others={503: json_of(ProgressReport)})
PROBE_TIMEOUT_S = 20.0
_PROBE_POLL_S = 0.1


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of the health routes."""
    router = AccessRouter(Access.OPEN, tags=["health"])

    async def health() -> Response:
        """Return 200 if requests can be served; else 503 with the reason.

        A server whose generation is paused counts as healthy.
        """
        return answer_health(context)

    async def ready() -> Response:
        """Return 200 if requests are accepted now; else 503 with the reason."""
        return _answer(context, why_not_ready(context))

    router.add_api_route("/health", health, methods=["GET"], openapi_extra=HEALTH)
    for path in ("/readyz", "/ready"):
        router.add_api_route(path, ready, methods=["GET"], openapi_extra=HEALTH)

    @router.get("/livez", openapi_extra=operation(others={503: json_of(NotAlive)}))
    async def livez() -> Response:
        """Return 200 unless this process should be replaced."""
        reason = why_not_alive(context)
        if reason is None:
            return Response(status_code=200)
        return json_response({"alive": False, "reason": reason}, 503)

    progress = json_of(ProgressReport)

    @router.get("/startupz", openapi_extra=operation(ok=progress, others={503: progress}))
    async def startupz() -> Response:
        """Report phase and progress of the start; the status is 200 once requests are served."""
        started = context.status.is_ready and context.lifecycle.warmed_up
        return json_response(progress_report(context), 200 if started else 503)

    failed = json_of(ProgressReport, NoToken)

    @router.get("/health_generate", openapi_extra=operation(others={503: failed}))
    async def health_generate() -> Response:
        """Return 200 if the engine makes a token in time, for a probe or for another request."""
        if why_not_healthy(context) is not None:
            return _answer(context, why_not_healthy(context))
        if await _is_alive(context):
            return Response(status_code=200)
        return json_response({"ready": False, "reason": "No token came in time."}, 503)

    return router


def answer_health(context: ServiceContext) -> Response:
    """Return the response of `/health`: 200 if requests can be served, else 503."""
    return _answer(context, why_not_healthy(context))


def _answer(context: ServiceContext, reason: str | None) -> Response:
    if reason is None:
        return Response(status_code=200)
    return json_response(progress_report(context), 503, retry_after="2")


async def _is_alive(context: ServiceContext) -> bool:
    # A paused worker makes no tokens, so only its loop is asked for an answer.
    if why_waiting(context) is not None:
        return (await context.client.calls.control(Ping, PROBE_TIMEOUT_S)).success
    return await _token_came(context)


def _probe(context: ServiceContext) -> GenerationInput:
    rid = f"HEALTH_CHECK_{secrets.token_hex(16)}"
    if context.model.gives != "tokens":
        return vector_input([0], rid)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    return GenerationInput([0], RequestSpec(row=RowSpec(sampling=sampling), rid=rid))


async def _token_came(context: ServiceContext) -> bool:
    before = context.status.total("generation_tokens_total")
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    try:
        stream = context.client.generate(_probe(context), is_recorded=False)
    except HeadraceError:
        return False
    probe = asyncio.create_task(_read(stream))
    try:
        while time.monotonic() < deadline:
            done, _ = await asyncio.wait((probe,), timeout=_PROBE_POLL_S)
            if done:
                return probe.result()
            # A token of another request shows as well that the engine works, so the probe need not
            # wait until its turn comes.
            if context.status.total("generation_tokens_total") > before:
                return True
        return False
    finally:
        probe.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probe
        stream.close()


async def _read(stream: GenerationStream) -> bool:
    try:
        return any([chunk.finish_reason is not None async for chunk in stream])
    except HeadraceError:
        return False
