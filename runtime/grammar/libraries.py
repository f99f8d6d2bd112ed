"""Uses several grammar libraries as one.

A grammar that the first library cannot follow exactly is compiled by another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from runtime.grammar.cache import content_of
from runtime.grammar.grammar_backend import (
    GRAMMAR_BACKENDS,
    BitmaskRows,
    GrammarBackend,
    GrammarError,
    Matcher,
)
from runtime.requests.sampling_params import GrammarSpec

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 600
Check = Callable[[GrammarBackend[Any], bytes], None]
Make = Callable[[], GrammarBackend[Any]]


class NotLoaded(Exception):
    """A grammar needs a library that is not loaded; the message is the library's name."""


class _Loaded(NamedTuple):
    library: str
    grammar: Any


class _Followed:
    """A matcher of one of the libraries.

    Attributes:
        library: name of the library.
        inner: the library's own matcher.
        accept: the `accept` of `inner`.
    """

    def __init__(self, library: str, inner: Matcher) -> None:
        self.library = library
        self.inner = inner
        # The method is stored, so that a token costs no additional call.
        self.accept = inner.accept

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_terminated


class GrammarLibraries:
    """Several grammar libraries that act as one `GrammarBackend`.

    Attributes:
        names: names of the libraries, in the order in which they are tried.
    """

    def __init__(
        self,
        libraries: Mapping[str, GrammarBackend[Any]],
        later: Mapping[str, Make] = MappingProxyType({}),
    ) -> None:
        """Use at least one library.

        Args:
            libraries: loaded libraries, in the order in which they are tried.
            later: functions that set up further libraries. They are called only if the loaded ones
                cannot compile a grammar, because a library may need much memory: one needs 240 MB
                for a vocabulary of 150,000 tokens.
        """
        self._libraries = dict(libraries)
        self._later = dict(later)
        self.names = (*self._libraries, *self._later)

    def load_all(self) -> None:
        """Load the libraries that are not loaded yet; those that fail are removed."""
        for name in tuple(self._later):
            self._loaded(name)

    def _loaded(self, name: str) -> GrammarBackend[Any] | None:
        make = self._later.pop(name, None)
        if make is not None:
            try:
                self._libraries[name] = make()
            except (KeyboardInterrupt, SystemExit):
                raise
            # All errors are caught, because panics of the libraries are not `Exception`s.
            except BaseException as error:
                _log_failure(name, error)
                self.names = tuple(each for each in self.names if each != name)
        return self._libraries.get(name)

    def compile(
        self, spec: GrammarSpec, check: Check | None = None, *, may_load: bool = True
    ) -> bytes:
        """Compile a grammar with the first library that can, and return its name and the result.

        Args:
            spec: the grammar.
            check: raises `GrammarError` if a compiled grammar cannot be used.
            may_load: whether further libraries may be loaded.

        Raises:
            GrammarError: no library can compile the grammar.
            NotLoaded: no loaded library can compile the grammar, and `may_load` is false.
        """
        reasons: dict[str, str] = {}
        for name in self.names:
            if name in self._later and not may_load:
                raise NotLoaded(name)
            library = self._loaded(name)
            if library is None:
                continue
            try:
                payload = library.compile(spec)
                if check is not None:
                    check(library, payload)
            except GrammarError as error:
                reasons[name] = str(error)
                continue
            head = len(payload) - len(content_of(payload))
            return payload[:head] + _mark(name) + payload[head:]
        raise GrammarError(_reason(reasons))

    def load(self, payload: bytes) -> _Loaded:
        """Load a grammar from the result of `compile`; loads the library if needed.

        Raises:
            GrammarError: the bytes do not come from `compile`, or their library is not available.
        """
        mark, content = content_of(payload)[:1], content_of(payload)[1:]
        for name in self.names:
            library = self._loaded(name) if mark == _mark(name) else None
            if library is not None:
                head = payload[: len(payload) - len(content) - 1]
                return _Loaded(name, library.load(head + content))
        raise GrammarError("not a grammar of an available library")

    def start(self, compiled: _Loaded) -> _Followed:
        """Return a matcher at the beginning of a loaded grammar, for a new output."""
        return _Followed(
            compiled.library, self._libraries[compiled.library].start(compiled.grammar)
        )

    def fill(self, matchers: Sequence[_Followed], words: BitmaskRows) -> None:
        """Compute which tokens are allowed next in each output; see `GrammarBackend.fill`."""
        names = {each.library for each in matchers}
        if len(names) == 1:
            self._libraries[names.pop()].fill([each.inner for each in matchers], words)
            return
        for name in names:
            places = [place for place, each in enumerate(matchers) if each.library == name]
            made = np.empty((len(places), words.shape[1]), dtype=words.dtype)
            self._libraries[name].fill([matchers[place].inner for place in places], made)
            words[places] = made


def open_libraries(
    first: str, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]
) -> GrammarLibraries:
    """Set up the installed libraries that support a tokenizer; `first` is tried first.

    Only `first` is loaded now, unless it does not support the tokenizer.

    Args:
        first: name of the library that is tried first.
        tokenizer_folder: folder of the tokenizer.
        vocab_size: width of the logits.
        eos_token_ids: token ids that end an output.

    Raises:
        Exception: the error of `first`, if no library supports the tokenizer.
    """

    def make(name: str) -> GrammarBackend[Any]:
        return GRAMMAR_BACKENDS.load(name)(tokenizer_folder, vocab_size, eos_token_ids)

    others = [name for name in GRAMMAR_BACKENDS if name != first and find_spec(name) is not None]
    later = {name: partial(make, name) for name in others}
    try:
        return GrammarLibraries({first: make(first)}, later)
    except (KeyboardInterrupt, SystemExit):
        raise
    # All errors are caught, because panics of the libraries are not `Exception`s.
    except BaseException as error:
        _log_failure(first, error)
        found = GrammarLibraries({}, later)
        found.load_all()
        if not found.names:
            raise
        return found


def _log_failure(name: str, error: BaseException) -> None:
    logger.info("%s cannot work with this tokenizer: %s", name, error)


def _mark(name: str) -> bytes:
    return name[:1].encode()


def _reason(reasons: Mapping[str, str]) -> str:
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    reason = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return reason[:_MAX_MESSAGE_CHARS]
