"""What a field of a body would have taken, for errors that only say what is wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

_INVALID_CHOICE = "Invalid enum value "
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


def explain(error: msgspec.ValidationError, expected: Any) -> str:
    """The message of `error`, met while something was read as the type `expected`.

    A field that takes one of a few strings gets them listed; every other message stays as it is.
    """
    message = str(error)
    reason, found, place = message.rpartition(" - at `")
    if not found or not reason.startswith(_INVALID_CHOICE):
        return message
    choices = list(_choices(_type_info(expected), place))
    if not choices:
        return message
    return f"{reason}, expected {' or '.join(choices)}{found}{place}"


@functools.cache
def _type_info(expected: Any) -> inspect.Type:
    return inspect.type_info(expected)


def _choices(root: inspect.Type, place: str) -> Iterator[str]:
    # What a path names may be of several types at once: `$.tags[0]` of `list[A] | dict[str, B]`.
    nodes = list(_flat([root]))
    for step in _STEP.finditer(place):
        nodes = list(_flat(_below(nodes, step.group(1))))
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            yield from map(repr, node.values)
        elif isinstance(node, inspect.BoolType):
            yield from ("true", "false")


def _below(nodes: Iterable[inspect.Type], name: str | None) -> Iterator[inspect.Type]:
    """What stands in the field `name` of `nodes`; in any of their items when it is `None`."""
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
