"""Imports a library without the large packages that it imports but that are not needed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


class _AnyMember(type):
    def __getattr__(cls, name: str) -> type[_Anything]:
        return _any_member(name)


class _Anything(metaclass=_AnyMember):
    """A placeholder for any class of a missing package, and for its instances; always false."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __bool__(self) -> bool:
        return False


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[_Anything]:
        return _any_member(name)


def _any_member(name: str) -> type[_Anything]:
    # Python itself looks up names that begin with two underscores.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything


def import_light(name: str, *without: str) -> Any:
    """Import `name` with placeholders instead of packages in `without` that are not imported yet.

    Placeholders work in annotations, as base classes, as constants and in `isinstance`. If the
    import needs more than this, `name` is imported again with the real packages. Modules that
    `name` imports keep their placeholders. No other thread may import one of the packages at the
    same time.

    Args:
        name: a library that is not imported yet.
        *without: packages that the library imports, but whose functions are not called.

    Returns:
        The module of the library.

    Raises:
        Exception: the error of the import with the real packages.
    """
    try:
        with _standing_in([each for each in without if each not in sys.modules]):
            return import_module(name)
    except Exception:
        for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[each]
        return import_module(name)


@contextmanager
def _standing_in(packages: list[str]) -> Iterator[None]:
    sys.modules.update({name: _StandIn(name) for name in packages})
    try:
        yield
    finally:
        for name in packages:
            sys.modules.pop(name, None)
