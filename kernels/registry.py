"""Tables of strings: listing names imports nothing; a missing library speaks only when chosen."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, cast

T = TypeVar("T")


def load_object(path: str) -> object:
    """Import and return what is at `path`, written `package.module:attribute`, or a module."""
    module_name, _, attribute = path.partition(":")
    module = import_module(module_name)
    return cast("object", getattr(module, attribute)) if attribute else module


class Registry(Generic[T]):
    """A fixed table from a name to the string path of an object, imported on first use.

    Attributes:
        error: what an unknown name raises.
    """

    error: type[Exception] = ValueError

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        """Name the `kind` of thing for messages; `entries` maps name to `module:attribute`."""
        self.kind = kind
        self.entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def path(self, name: str) -> str:
        """Return where the object called `name` is.

        Raises:
            error: no such name; the message lists the known ones.
        """
        if name not in self.entries:
            near = get_close_matches(name, self.entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self.entries))
            raise self.error(f"Unknown {self.kind} {name!r}.{hint} Known: {known}.")
        return self.entries[name]

    def load(self, name: str) -> T:
        """Import the object called `name`.

        Raises:
            error: no such name; the message lists the known ones.
        """
        return cast("T", load_object(self.path(name)))
