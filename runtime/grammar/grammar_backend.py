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
        """Advance by one token. Return false, without advancing, if the token is not allowed.

        Raises:
            GrammarError: the token is allowed, but a limit of the library was reached after it.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that no token may follow."""


M = TypeVar("M", bound=Matcher)


class GrammarBackend(Protocol[M]):
    """The interface of a grammar library."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile a constraint into bytes that `load` reads, also in another process.

        Raises:
            GrammarError: the constraint is invalid or not supported.
        """

    def load(self, payload: bytes) -> Any:
        """Load a grammar from the bytes that `compile` wrote.

        Raises:
            GrammarError: `compile` did not write these bytes.
        """

    def start(self, compiled: Any) -> M:
        """Begin an output at the start of a loaded grammar."""

    def fill(self, matchers: Sequence[M], words: BitmaskRows) -> None:
        """Write which tokens are allowed next in each output.

        Args:
            matchers: the outputs' matchers, `[n]`, none of which has terminated; they are not
                advanced.
            words: `[n, ceil(vocab_size / 32)]` int32, overwritten; bit `i % 32` of word `i // 32`
                stands for token `i`.
        """


class MakeBackend(Protocol):
    """A function that builds a back end."""

    def __call__(
        self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]
    ) -> GrammarBackend[Any]:
        """Build the back end for a tokenizer; `vocab_size` is the logits' width."""
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
    """Number of words of a bitmask row."""
    return -(-vocab_size // 32)


def is_lark(text: str) -> bool:
    """Whether an `ebnf` is written in llguidance's own language, which guidance sends."""
    return text.lstrip().startswith("%llguidance")
