"""Example values of a client package's types, for requests that the client could send."""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Iterator
from typing import Any

import typing_extensions

# Values for string fields whose form the server checks, by key.
TEXTS = {
    "arguments": '{"a": 1}',
    "url": "https://example.com/a",
    "image_url": "data:image/png;base64,iVBORw0KGgo=",
    "file_data": "QQ==",
    "data": "QQ==",
}
_MAX_DEPTH = 6
_PLAIN: dict[Any, Any] = {int: 1, float: 1.0, bool: True, type(None): None}


def examples(expected: Any, *, key: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield values of a type. The first is the simplest; each other one differs in one place.

    For a dictionary, the values have all keys, only the required keys, and each branch of the union
    of each key. `None` is a branch if the type has it.

    Args:
        expected: a `TypedDict`, a union, a `Literal` or a simple type.
        key: the key of the value in its dictionary.
        depth: depth of nesting. Branches are tried only at the first levels.
    """
    origin = typing.get_origin(expected)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        yield from examples(typing.get_args(expected)[0], key=key, depth=depth)
    elif origin is typing.Union or origin is type(int | str):
        for branch in typing.get_args(expected):
            yield from examples(branch, key=key, depth=depth)
    elif origin is typing.Literal:
        yield typing.get_args(expected)[0]
    elif origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        (item,) = typing.get_args(expected)
        yield from ([each] for each in examples(item, key=key, depth=depth))
    elif origin is dict or expected in (dict, object, Any):
        yield {}
    elif typing_extensions.is_typeddict(expected):
        yield from _dictionaries(expected, depth)
    elif expected is str:
        yield TEXTS.get(key, "word")
    elif expected in _PLAIN:
        yield _PLAIN[expected]


def _dictionaries(expected: Any, depth: int) -> Iterator[dict[str, Any]]:
    if depth == _MAX_DEPTH:
        return
    hints = typing_extensions.get_type_hints(expected, include_extras=True)
    whole: dict[str, Any] = {}
    branches = []
    for name, hint in hints.items():
        found = list(examples(hint, key=name, depth=depth + 1))
        if found:
            whole[name] = found[0]
            branches += [(name, each) for each in found[1:]]
    yield whole
    yield {name: each for name, each in whole.items() if _is_required(hints[name])}
    yield from ({**whole, name: each} for name, each in branches)


def _is_required(hint: Any) -> bool:
    return typing.get_origin(hint) is typing_extensions.Required


def optional_keys(expected: Any) -> list[str]:
    """Return the keys that a dictionary of the type may omit."""
    hints = typing_extensions.get_type_hints(expected, include_extras=True)
    return [name for name, hint in hints.items() if not _is_required(hint)]
