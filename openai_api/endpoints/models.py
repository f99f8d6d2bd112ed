"""`/v1/models`: the served model and its adapters. It also answers while weights are loading."""

from __future__ import annotations

from typing import Any

from openai_api.call import Call, Whole
from openai_api.openai_context import OpenAIContext
from runtime.client.adapter_record import Adapter
from runtime.errors import HeadraceError


class ModelNotFound(HeadraceError):
    """The request names a model that this server does not serve."""

    status_code = 404
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        """Name the missing model in the message; a client sent the name, so it is shortened."""
        super().__init__(f"The model {model[:128]!r} does not exist.", param="model")


async def list_models(call: Call, context: OpenAIContext) -> Whole:  # noqa: ARG001
    """Answer `GET /v1/models`: list the served model and its adapters (LoRA)."""
    record = context.service.adapters.record
    cards = [_adapter_card(context, adapter) for adapter in record.named()]
    return Whole({"object": "list", "data": [_card(context), *cards]})


async def retrieve_model(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/models/{model_id}`: describe the model or an adapter; other names get 404."""
    model_id = str(call.path["model_id"])
    for adapter in context.service.adapters.record.named():
        if adapter.name == model_id:
            return Whole(_adapter_card(context, adapter))
    if model_id != context.service.served_model_name:
        raise ModelNotFound(model_id)
    return Whole(_card(context))


def _card(context: OpenAIContext) -> dict[str, Any]:
    name = context.service.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        # SGLang's clients expect this value.
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": context.service.client.limits.context_len,
    }


def _adapter_card(context: OpenAIContext, adapter: Adapter) -> dict[str, Any]:
    card = _card(context)
    return {
        **card,
        "id": adapter.name,
        "root": adapter.path or adapter.name,
        "parent": card["id"],
        "max_model_len": None,
    }
