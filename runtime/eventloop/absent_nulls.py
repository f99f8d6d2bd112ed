"""Decodes bodies in which a null field counts as an omitted one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")


def convert(value: Any, expected: type[T]) -> T:
    """Call `msgspec.convert`, with null fields treated as omitted.

    Raises:
        msgspec.ValidationError: `value` is not of the type `expected`.
    """
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError:
        return msgspec.convert(without_nulls(value, expected), expected)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Call `decoder.decode`, with null fields treated as omitted.

    A body is read a second time only if the first reading refuses it.

    Raises:
        msgspec.DecodeError: `body` is not JSON, or not of the type (`msgspec.ValidationError`).
        RecursionError: `body` is nested too deeply.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        if b"null" not in body:
            raise
    value = without_nulls(msgspec.json.decode(body), decoder.type)
    return msgspec.convert(value, decoder.type)


def without_nulls(value: Any, expected: Any) -> Any:
    """Return `value` without the null fields that the type `expected` allows to omit.

    Nulls in lists stay, and so do those inside fields that are declared as plain JSON.
    """
    return _pruned(value, _info(expected))


@functools.cache
def _info(expected: Any) -> inspect.Type:
    return inspect.type_info(expected)


def _pruned(value: Any, info: inspect.Type) -> Any:
    match info:
        case inspect.Metadata():
            return _pruned(value, info.type)
        case inspect.UnionType():
            for each in info.types:
                if _suits(value, each):
                    return _pruned(value, each)
        case inspect.StructType() if isinstance(value, dict):
            return _pruned_fields(value, info)
        case inspect.CollectionType() if isinstance(value, list):
            return [_pruned(each, info.item_type) for each in value]
        case inspect.DictType() if isinstance(value, dict):
            return {key: _pruned(each, info.value_type) for key, each in value.items()}
    return value


def _pruned_fields(value: Mapping[str, Any], info: inspect.StructType) -> dict[str, Any]:
    fields = {each.encode_name: each for each in info.fields}
    kept = {}
    for key, each in value.items():
        field = fields.get(key)
        if field is None:
            kept[key] = each
        elif each is not None or field.required:
            kept[key] = _pruned(each, field.type)
    return kept


def _suits(value: Any, info: inspect.Type) -> bool:
    """Whether `value` has the kind (and the tag, if any) of `info`, one type of a union."""
    match info:
        case inspect.Metadata():
            return _suits(value, info.type)
        case inspect.StructType():
            is_tagged = info.tag_field is not None
            return isinstance(value, dict) and (
                not is_tagged or value.get(info.tag_field) == info.tag
            )
        case inspect.CollectionType():
            return isinstance(value, list)
        case inspect.DictType():
            return isinstance(value, dict)
    return False
