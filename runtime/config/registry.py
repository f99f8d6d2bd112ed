"""Tables of strings: listing names imports nothing; a missing library speaks only when chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, cast

from runtime.errors import InvalidRequest

T = TypeVar("T")


def load_object(path: str) -> object:
    """Import and return the object at `path`, written `package.module:attribute`."""
    module_name, _, attribute = path.partition(":")
    return cast("object", getattr(import_module(module_name), attribute))


class Registry(Generic[T]):
    """A fixed table from a name to the string path of an object, imported on first use."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        """Name the `kind` of thing for messages; `entries` maps name to `module:attribute`."""
        self.kind = kind
        self.entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def load(self, name: str) -> T:
        """Import the object called `name`.

        Raises:
            InvalidRequest: no such name; the message lists the known ones.
        """
        path = self.entries.get(name)
        if path is None:
            near = get_close_matches(name, self.entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self.entries))
            raise InvalidRequest(f"Unknown {self.kind} {name!r}.{hint} Known: {known}.")
        return cast("T", load_object(path))
