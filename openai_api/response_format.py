"""`response_format`: OpenAI's way to say what an answer must look like."""

from __future__ import annotations

from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarSpec

_PARAM = "response_format"
_ANY_OBJECT = '{"type":"object"}'


def constraint_of(response_format: dict[str, Any] | None) -> GrammarSpec | None:
    """What `response_format` asks for; `None` for free text.

    Raises:
        InvalidRequest: an unknown type, or a schema that is missing.
    """
    if response_format is None:
        return None
    match response_format.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_schema", _ANY_OBJECT)
        case "json_schema":
            return GrammarSpec("json_schema", _json(_schema(response_format)))
        case "structural_tag":
            return GrammarSpec("structural_tag", _json(response_format))
        case other:
            raise InvalidRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag, "
                f"got {str(other)[:40]!r}.",
                param=_PARAM,
            )


def _schema(response_format: dict[str, Any]) -> Any:
    # Some clients leave out the level that holds the name.
    described = response_format.get("json_schema", response_format)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("response_format needs json_schema.schema, an object.", param=_PARAM)
    return schema


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"response_format: {error}.", param=_PARAM) from None
