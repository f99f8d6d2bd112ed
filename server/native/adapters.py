"""Routes that load and unload adapters (LoRA) while the server runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.checkpoint.weight_roots import AdapterRoots, WeightRoots
from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.weights.adapter_control import AdapterControl, AdapterOutcome
from runtime.weights.adapter_requests import (
    AdapterTensorsBody,
    LoadAdapterBody,
    UnloadAdapterBody,
    tensors_of,
)
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.request_body import read_raw

B = TypeVar("B", bound=msgspec.Struct)


class AdapterAnswer(TypedDict):
    """Whether the change succeeded, why not, and the path of each existing adapter by name."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


_ANSWER = json_of(AdapterAnswer)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of the routes that load and unload adapters."""
    router = AccessRouter(Access.ADMIN, tags=["adapters"])
    adapters, model = context.adapters, context.config.model
    own = [str(each.folder) for each in adapters.record.all()]
    roots = AdapterRoots(WeightRoots(tuple(model.weights_root), own=frozenset(own)))

    async def load(body: LoadAdapterBody) -> AdapterOutcome:
        """Load an adapter from a PEFT folder on the server's machine."""
        return await adapters.load(
            body.lora_name, body.lora_path, pinned=bool(body.pinned), roots=roots
        )

    async def load_tensors(body: AdapterTensorsBody) -> AdapterOutcome:
        """Load an adapter from the body: its configuration, and the bytes of a safetensors file."""
        return await adapters.load_tensors(
            body.lora_name, body.config_dict, tensors_of(body), pinned=bool(body.pinned)
        )

    async def unload(body: UnloadAdapterBody) -> AdapterOutcome:
        """Unload an adapter; the answer comes when the requests that use it have ended."""
        return await adapters.unload(body.lora_name)

    _route(router, adapters, "/load_lora_adapter", LoadAdapterBody, load)
    _route(router, adapters, "/load_lora_adapter_from_tensors", AdapterTensorsBody, load_tensors)
    _route(router, adapters, "/unload_lora_adapter", UnloadAdapterBody, unload)
    return router


def _route(
    router: AccessRouter,
    adapters: AdapterControl,
    path: str,
    body_type: type[B],
    act: Callable[[B], Awaitable[AdapterOutcome]],
) -> None:
    decoder = msgspec.json.Decoder(body_type)

    async def handler(request: Request) -> Response:
        body = await read_json(await read_raw(request), decoder)
        try:
            outcome = await act(body)
        except InvalidRequest as error:
            outcome = AdapterOutcome(False, error.message, adapters.record.paths())
        answer: AdapterAnswer = {
            "success": outcome.success,
            "error_message": None if outcome.success else outcome.message,
            "loaded_adapters": outcome.loaded,
        }
        return json_response(answer, 200 if outcome.success else 400)

    handler.__doc__ = act.__doc__
    handler.__name__ = path.strip("/")
    documented = operation(body_type, ok=_ANSWER, others={400: _ANSWER})
    router.add_api_route(path, handler, methods=["POST"], openapi_extra=documented)
