"""Grammars for a `tool_choice` that forces a call, so that the model can write only calls.

The output is a JSON array of objects with `name` and `parameters`. It does not depend on the format
in which the model writes calls by itself, so no tool-call parser is needed.
"""

from __future__ import annotations

from typing import Any

import orjson

from openai_api.schemas.chat import ChatCompletionRequest, NamedToolChoice, tool_names
from runtime.errors import InvalidRequest
from runtime.grammar.schema_check import check_schema
from runtime.requests.sampling_params import GrammarSpec

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def forces_call(request: ChatCompletionRequest) -> bool:
    """Whether the request demands that the answer is a tool call."""
    choice = request.tool_choice
    if not isinstance(choice, NamedToolChoice):
        return choice == "required"
    return choice.allowed_tools is None or choice.allowed_tools.mode == "required"


def call_constraint(request: ChatCompletionRequest) -> GrammarSpec:
    """Return the grammar for the output of a checked request that forces a call.

    Raises:
        InvalidRequest: a function's parameters are not a JSON schema that a grammar can follow.
    """
    choice = request.tool_choice
    named = choice.function if isinstance(choice, NamedToolChoice) else None
    wanted = {named.name} if named is not None else set(tool_names(request))
    calls: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for index, tool in enumerate(request.tools or []):
        function = tool["function"]
        if function["name"] not in wanted:
            continue
        parameters = function.get("parameters") or _ANY_OBJECT
        check_schema(parameters, f"tools[{index}].function.parameters")
        # A `$ref` is a path from the root of its schema. As each schema is moved into `$defs`, its
        # references are changed to the new paths.
        shared[f"tool{index}"] = _moved(parameters, f"#/$defs/tool{index}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "parameters": {"$ref": f"#/$defs/tool{index}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "$defs": shared,
    }
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    try:
        return GrammarSpec("json_schema", orjson.dumps(schema).decode())
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"tools: {error}.", param="tools") from None


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }
