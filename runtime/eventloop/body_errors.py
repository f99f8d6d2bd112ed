"""Messages for refused bodies: they list a field's choices, and suggest similar field names."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from runtime.errors import InvalidRequest

_INVALID_CHOICE = "Invalid enum value "
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.{1,64})`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


class InvalidBody(InvalidRequest):
    """A body is not the JSON that its route takes. The message says where."""


def not_json(reason: str) -> InvalidBody:
    """Return the error for a body that is not JSON."""
    return InvalidBody(f"The body is not valid JSON: {reason}.")


def fields_of_type(body: type[msgspec.Struct], kind: object) -> tuple[str, ...]:
    """Return the names of the fields of `body` that are declared with the type `kind`."""
    return tuple(field.name for field in msgspec.structs.fields(body) if field.type == kind)


def explain(error: msgspec.ValidationError, expected: Any) -> str:
    """Return the message of an error, improved for two cases.

    If a field takes one of a few strings, the message lists them. If a field is unknown, the
    message suggests the most similar name.

    Args:
        error: raised while decoding a body.
        expected: the type that the body was decoded into.
    """
    message = str(error)
    reason, found, place = message.rpartition(" - at `")
    unknown = _UNKNOWN_FIELD.fullmatch(reason if found else message)
    if unknown is not None:
        place = place if found else ""
        hint = did_you_mean(unknown[1], _field_names(_type_info(expected), place))
        return f"{unknown[0]}.{hint}{found}{place}" if hint else message
    if not found or not reason.startswith(_INVALID_CHOICE):
        return message
    choices = list(_choices(_type_info(expected), place))
    if not choices:
        return message
    return f"{reason}, expected {' or '.join(choices)}{found}{place}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar of the `known` names; empty if none is similar."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@functools.cache
def _type_info(expected: Any) -> inspect.Type:
    return inspect.type_info(expected)


def _choices(root: inspect.Type, place: str) -> Iterator[str]:
    for node in _nodes(root, place):
        if isinstance(node, inspect.LiteralType):
            yield from map(repr, node.values)
        elif isinstance(node, inspect.BoolType):
            yield from ("true", "false")


def _field_names(root: inspect.Type, place: str) -> set[str]:
    structs = (node for node in _nodes(root, place) if isinstance(node, inspect.StructType))
    return {field.encode_name for struct in structs for field in struct.fields}


def _nodes(root: inspect.Type, place: str) -> list[inspect.Type]:
    # A path may lead to several types: `$.tags[0]` of `list[A] | dict[str, B]` to `A` and `B`.
    nodes = list(_flat([root]))
    for step in _STEP.finditer(place):
        nodes = list(_flat(_below(nodes, step.group(1))))
    return nodes


def _below(nodes: Iterable[inspect.Type], name: str | None) -> Iterator[inspect.Type]:
    """Yield the types of the field `name` of `nodes`; of their items if `name` is `None`."""
    for node in nodes:
        if name is not None:
            if isinstance(node, inspect.StructType):
                yield from (each.type for each in node.fields if each.encode_name == name)
        elif isinstance(node, inspect.CollectionType):
            yield node.item_type
        elif isinstance(node, inspect.DictType):
            yield node.value_type


def _flat(nodes: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for node in nodes:
        if isinstance(node, inspect.UnionType):
            yield from _flat(node.types)
        elif isinstance(node, inspect.Metadata):
            yield from _flat([node.type])
        else:
            yield node
