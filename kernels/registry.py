"""Tables from names to import paths.

Listing names imports nothing, so a missing library causes an error only when its entry is chosen.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, cast

T = TypeVar("T")
EntryT = TypeVar("EntryT")


def load_object(path: str) -> object:
    """Import and return the object at `path`: `package.module:attribute`, or a module's name."""
    module_name, _, attribute = path.partition(":")
    module = import_module(module_name)
    return cast("object", getattr(module, attribute)) if attribute else module


class Names(Generic[EntryT]):
    """A fixed table from names to entries.

    Attributes:
        kind: what the names stand for, such as "attention backend"; used in messages.
        entries: the entries by name.
        error: type of the exception for an unknown name.
    """

    error: type[Exception] = ValueError

    def __init__(self, kind: str, entries: Mapping[str, EntryT]) -> None:
        """Keep the entries; import nothing."""
        self.kind = kind
        self.entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def find(self, name: str) -> EntryT:
        """Return the entry called `name`.

        Raises:
            error: the name is unknown; the message lists the known names.
        """
        if name not in self.entries:
            near = get_close_matches(name, self.entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self.entries))
            raise self.error(f"Unknown {self.kind} {name!r}.{hint} Known: {known}.")
        return self.entries[name]


class Registry(Names[str], Generic[T]):
    """A table from a name to the import path of an object, which is imported on first use."""

    def load(self, name: str) -> T:
        """Import and return the object called `name`; see `find` for errors."""
        return cast("T", load_object(self.find(name)))
