"""The interface of a grammar library: it compiles in one process and follows tokens in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.config.registry import Registry
from runtime.requests.sampling_params import GrammarSpec

BitmaskRows = NDArray[np.int32]


class GrammarError(Exception):
    """A constraint that cannot be compiled or followed; the message is for the client."""


class Matcher(Protocol):
    """Follows one output through its grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; returns false, without advancing, if it is not allowed.

        Raises:
            GrammarError: it is allowed, but a limit of the library was reached after it.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow any more."""


M = TypeVar("M", bound=Matcher)


class GrammarBackend(Protocol[M]):
    """What a grammar library offers."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile a constraint into bytes that `load` reads, also in another process.

        Raises:
            GrammarError: it is invalid or not supported.
        """

    def load(self, payload: bytes) -> Any:
        """Read what `compile` has written.

        Raises:
            GrammarError: these are not such bytes.
        """

    def start(self, compiled: Any) -> M:
        """Begin an output at the start of a loaded grammar."""

    def fill(self, matchers: Sequence[M], words: BitmaskRows) -> None:
        """Write which tokens are allowed next in each output.

        Args:
            matchers: `[n]`, none of them terminated; not advanced.
            words: `[n, ceil(vocab_size / 32)]` int32, overwritten; bit `i % 32` of word `i // 32`
                stands for token `i`.
        """


class MakeBackend(Protocol):
    """How a back end is built."""

    def __call__(
        self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]
    ) -> GrammarBackend[Any]:
        """Build it for a tokenizer; `vocab_size` is the logits' width."""
        ...


GRAMMAR_BACKENDS: Registry[MakeBackend] = Registry(
    "grammar backend",
    {
        "xgrammar": "runtime.grammar.xgrammar:XGrammarBackend",
        "llguidance": "runtime.grammar.llguidance:LLGuidanceBackend",
    },
)

BackendFactory = Callable[[], GrammarBackend[Any]]


def num_words(vocab_size: int) -> int:
    """Words of a bitmask row."""
    return -(-vocab_size // 32)


def is_lark(text: str) -> bool:
    """Whether an `ebnf` is written in llguidance's own language, as guidance sends it."""
    return text.lstrip().startswith("%llguidance")
