"""Documentation of bodies in `/openapi.json`, made from the structs that decode them."""

from __future__ import annotations

from typing import Any

import msgspec


def body_schema(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """What `openapi_extra` wants: the request body's JSON schema, references written out."""
    # Fields typed `object` take anything; the library wants some keyword said about them.
    schema = msgspec.json.schema(struct, schema_hook=lambda _: {"description": "any JSON value"})
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str):
        return _inline(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
