"""`/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the single served model."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from ollama_api.ollama_answers import (
    ModelDetails,
    ModelTag,
    ModelTags,
    OllamaVersion,
    ShownModel,
)
from ollama_api.ollama_request import ShowRequest
from openai_api.call import Call, Whole
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from runtime.errors import InvalidRequest

_SHOW = msgspec.json.Decoder(ShowRequest)
# The version of Ollama whose API this package implements; clients check it.
_VERSION = "0.13.0"


async def list_tags(call: Call, context: OpenAIContext) -> Whole:  # noqa: ARG001
    """Answer with the list of models, which contains only the served model."""
    tags: ModelTags = {"models": [_tag(context)]}
    return Whole(tags)


async def show(call: Call, context: OpenAIContext) -> Whole:
    """Answer with the model's description; any name selects the served model."""
    request = await read_body(call, _SHOW)
    if not (request.model or request.name):
        raise InvalidRequest("model must be given.", param="model")
    service = context.service
    family = service.model.model_type
    shown: ShownModel = {
        "modelfile": "",
        "parameters": "",
        "template": "" if context.chat_template is None else context.chat_template.text,
        "details": _details(context),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": service.client.limits.context_len,
            f"{family}.embedding_length": service.model.hidden_size,
        },
        "capabilities": _capabilities(context),
        "modified_at": _since(context),
    }
    return Whole(shown)


async def version(call: Call, context: OpenAIContext) -> Whole:  # noqa: ARG001
    """Answer with the version of Ollama's API."""
    answer: OllamaVersion = {"version": _VERSION}
    return Whole(answer)


def _capabilities(context: OpenAIContext) -> list[str]:
    """Return the model's capabilities, as Ollama's clients name them."""
    if context.service.model.gives != "tokens":
        # Ollama does not have a word for scores.
        return ["embedding"] if context.service.model.gives == "vectors" else []
    parsers, template = context.parsers, context.chat_template
    found = ["completion"]
    if context.sees:
        found.append("vision")
    # A parser must know the model's calls, and the template must show the tools.
    if parsers.tools is not None and template is not None and template.shows_tools:
        found.append("tools")
    if parsers.reasoning is not None:
        found.append("thinking")
    return found


def _tag(context: OpenAIContext) -> ModelTag:
    name = context.service.served_model_name
    return {
        "name": name,
        "model": name,
        "modified_at": _since(context),
        "size": 0,
        "digest": "",
        "details": _details(context),
    }


def _details(context: OpenAIContext) -> ModelDetails:
    family = context.service.model.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _since(context: OpenAIContext) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
