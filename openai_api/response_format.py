"""`response_format`: OpenAI's constraint on an answer."""

from __future__ import annotations

from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarSpec

_PARAM = "response_format"
ANY_OBJECT = '{"type":"object"}'


def constraint_of(response_format: dict[str, Any] | None) -> GrammarSpec | None:
    """Return the constraint of `response_format`; `None` for free text.

    Raises:
        InvalidRequest: an unknown type, or a schema that is missing.
    """
    if response_format is None:
        return None
    match response_format.get("type", "text"):
        case "text":
            return None
        # llama.cpp and others take a schema here as well.
        case "json_object" if not _has_schema(response_format):
            return GrammarSpec("json_schema", ANY_OBJECT)
        case "json_object" | "json_schema":
            return GrammarSpec("json_schema", json_text(_schema(response_format), _PARAM))
        case "structural_tag":
            return GrammarSpec("structural_tag", json_text(response_format, _PARAM))
        case other:
            raise InvalidRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag, "
                f"got {str(other)[:40]!r}.",
                param=_PARAM,
            )


def _has_schema(response_format: dict[str, Any]) -> bool:
    return any(response_format.get(key) is not None for key in ("schema", "json_schema"))


def _schema(response_format: dict[str, Any]) -> Any:
    # Some clients omit the level that has the name.
    described = response_format.get("json_schema", response_format)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("response_format needs json_schema.schema, an object.", param=_PARAM)
    return schema


def json_text(value: Any, name: str) -> str:
    """Encode a part of a body as JSON.

    Raises:
        InvalidRequest: `value` cannot be JSON, such as half a surrogate pair; names the field.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"{name}: {error}.", param=name) from None
