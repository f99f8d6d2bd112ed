"""Imports a library without large packages that it imports but that are unused here."""

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
    """Stands for any class of an absent package, and for the result of calling it; always false."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __bool__(self) -> bool:
        return False


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[_Anything]:
        return _any_member(name)


def _any_member(name: str) -> type[_Anything]:
    # The interpreter itself looks up names with underscores.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything


def import_light(name: str, *without: str) -> Any:
    """Import `name` with stand-ins for the packages of `without` that are not imported yet.

    Stand-ins work for annotations, base classes, constants and `isinstance`. If `name` needs more
    of the packages, it is imported again with the real ones; modules that it imports keep their
    stand-ins. Meanwhile, no other thread may import one of the packages.

    Args:
        name: a library that is not imported yet.
        *without: packages that it imports, but whose functions it does not call.

    Returns:
        The library's module.

    Raises:
        Exception: whatever the import with the packages raises.
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
