"""Reads `response_format`, OpenAI's field for a constraint on the answer."""

from __future__ import annotations

from typing import Any

import orjson

from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarSpec

_PARAM = "response_format"
ANY_OBJECT = '{"type":"object"}'


def constraint_of(response_format: dict[str, Any] | None) -> GrammarSpec | None:
    """Return the constraint of `response_format`; `None` for an unconstrained answer.

    Raises:
        InvalidRequest: the type is unknown, or the schema is missing.
    """
    if response_format is None:
        return None
    match response_format.get("type", "text"):
        case "text":
            return None
        # As in llama.cpp and others, this type may have a schema too.
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
    # Some clients put `schema` directly into `response_format`, without `json_schema`.
    described = response_format.get("json_schema", response_format)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("response_format needs json_schema.schema, an object.", param=_PARAM)
    return schema


def json_text(value: Any, name: str) -> str:
    """Encode a part of a body as JSON text.

    Raises:
        InvalidRequest: `value` has a text that is not valid, such as a lone surrogate. The message
            has `name`, the field's name.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"{name}: {error}.", param=name) from None
