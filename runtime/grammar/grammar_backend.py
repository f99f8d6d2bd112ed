"""The interface of a grammar library.

A library compiles a grammar in one process. In another process, it computes the tokens that the
grammar allows at each position of an output.
"""

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
    """A grammar cannot be compiled or followed further; the message is for the client."""


class Matcher(Protocol):
    """The position of one output in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token of the output.

        Returns:
            False if the grammar does not allow the token; then the position is unchanged.

        Raises:
            GrammarError: the token is allowed, but the library reached one of its limits after it.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that no further token is allowed."""


M = TypeVar("M", bound=Matcher)


class GrammarBackend(Protocol[M]):
    """A grammar library that was set up for one tokenizer."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile a grammar into bytes for `load`, which may run in another process.

        Raises:
            GrammarError: the grammar is invalid or not supported.
        """

    def load(self, payload: bytes) -> Any:
        """Load a grammar from the result of `compile`.

        Raises:
            GrammarError: the bytes do not come from `compile`.
        """

    def start(self, compiled: Any) -> M:
        """Return a matcher at the beginning of a loaded grammar, for a new output."""

    def fill(self, matchers: Sequence[M], words: BitmaskRows) -> None:
        """Compute which tokens are allowed next in each output.

        Args:
            matchers: `[n]`, the positions of the outputs, none of which is complete. They do not
                change.
            words: `[n, ceil(vocab_size / 32)]` int32, overwritten. Bit `i % 32` of word `i // 32`
                is set if token `i` is allowed.
        """


class MakeBackend(Protocol):
    """A function that sets up a grammar library."""

    def __call__(
        self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]
    ) -> GrammarBackend[Any]:
        """Set up the library for a tokenizer; `vocab_size` is the width of the logits."""
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
    """Return the number of 32-bit words with a bit for each of `vocab_size` tokens."""
    return -(-vocab_size // 32)


def is_lark(text: str) -> bool:
    """Whether an `ebnf` is written in llguidance's dialect of Lark, as the guidance client does."""
    return text.lstrip().startswith("%llguidance")
