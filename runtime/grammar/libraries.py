"""Both grammar libraries as one back end.

A constraint that one library cannot follow exactly goes to the other library.
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
    """A library is needed that is not loaded."""


class _Loaded(NamedTuple):
    library: str
    grammar: Any


class _Followed:
    """See `runtime.grammar.grammar_backend.Matcher`.

    Attributes:
        library: name of the library that follows the output.
        inner: the library's own matcher.
        accept: the library's own method.
    """

    def __init__(self, library: str, inner: Matcher) -> None:
        self.library = library
        self.inner = inner
        # The method is stored so that a token costs no additional call.
        self.accept = inner.accept

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_terminated


class GrammarLibraries:
    """Several grammar libraries as one `runtime.grammar.grammar_backend.GrammarBackend`.

    Attributes:
        names: names of the libraries; the first one is tried first.
    """

    def __init__(
        self,
        libraries: Mapping[str, GrammarBackend[Any]],
        later: Mapping[str, Make] = MappingProxyType({}),
    ) -> None:
        """Use at least one library; the first ones are tried first.

        Args:
            libraries: loaded libraries.
            later: libraries that are loaded once the others cannot compile a constraint: one of the
                libraries needs 240 MB for a vocabulary of 150,000 tokens.
        """
        self._libraries = dict(libraries)
        self._later = dict(later)
        self.names = (*self._libraries, *self._later)

    def load_all(self) -> None:
        """Load the remaining libraries; omit libraries that cannot work."""
        for name in tuple(self._later):
            self._loaded(name)

    def _loaded(self, name: str) -> GrammarBackend[Any] | None:
        make = self._later.pop(name, None)
        if make is not None:
            try:
                self._libraries[name] = make()
            except (KeyboardInterrupt, SystemExit):
                raise
            # This catches everything that the libraries raise: their panics are not `Exception`s.
            except BaseException as error:
                _log_failure(name, error)
                self.names = tuple(each for each in self.names if each != name)
        return self._libraries.get(name)

    def compile(
        self, spec: GrammarSpec, check: Check | None = None, *, may_load: bool = True
    ) -> bytes:
        """Compile a constraint with the first library that can; the bytes name the library.

        Args:
            spec: the constraint.
            check: raises `GrammarError` for a compiled grammar that cannot be used.
            may_load: whether a library may be loaded for it.

        Raises:
            GrammarError: no library can compile it.
            NotLoaded: no loaded library can compile it, and there are others.
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
        """Load a grammar from the bytes that `compile` wrote; may load its library.

        Raises:
            GrammarError: `compile` did not write these bytes, or their library is not available.
        """
        mark, content = content_of(payload)[:1], content_of(payload)[1:]
        for name in self.names:
            library = self._loaded(name) if mark == _mark(name) else None
            if library is not None:
                head = payload[: len(payload) - len(content) - 1]
                return _Loaded(name, library.load(head + content))
        raise GrammarError("not a grammar of an available library")

    def start(self, compiled: _Loaded) -> _Followed:
        """Begin an output."""
        return _Followed(
            compiled.library, self._libraries[compiled.library].start(compiled.grammar)
        )

    def fill(self, matchers: Sequence[_Followed], words: BitmaskRows) -> None:
        """Write which tokens are allowed next in each output."""
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
    """Return all installed libraries that can work with a tokenizer, `first` in front.

    The others are loaded when they are needed, or at once if `first` cannot work with it.

    Args:
        first: name of the library that is tried first.
        tokenizer_folder: folder of the tokenizer.
        vocab_size: the logits' width.
        eos_token_ids: ids that end a text.

    Raises:
        Exception: whatever `first` raised, if no library can work.
    """

    def make(name: str) -> GrammarBackend[Any]:
        return GRAMMAR_BACKENDS.load(name)(tokenizer_folder, vocab_size, eos_token_ids)

    others = [name for name in GRAMMAR_BACKENDS if name != first and find_spec(name) is not None]
    later = {name: partial(make, name) for name in others}
    try:
        return GrammarLibraries({first: make(first)}, later)
    except (KeyboardInterrupt, SystemExit):
        raise
    # This catches everything that the libraries raise: their panics are not `Exception`s.
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
