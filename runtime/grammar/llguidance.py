"""The `llguidance` library: nothing is computed ahead, masks are derived as the output grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from runtime.grammar.blanks import MAX_BLANKS
from runtime.grammar.cache import content_of, with_size
from runtime.grammar.grammar_backend import BitmaskRows, GrammarError, is_lark
from runtime.grammar.llguidance_tags import tag_to_grammar
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer

_MAX_MESSAGE_CHARS = 300
_LOADED_PER_BYTE = 32
_JSON_OPTIONS: Any = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_BLANKS}}}"}


def _limits() -> LLParserLimits:
    # A state takes one or two kilobytes. Errors must not show what others have written.
    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class _Vocabulary:
    """A tokenizer as the library wants it: added tokens are text, but for the special ones.

    Read from the tokenizer's file, tags such as `<tool_call>` would be special because of their
    brackets: masked wherever text may come, and offered where their text must.

    Attributes:
        tokens: bytes of each token.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._backend = tokenizer.backend
        # Special tokens never stand for the text that they are written with.
        self._backend.encode_special_tokens = True
        self._plain = LLTokenizer(self._backend.to_str(), n_vocab=vocab_size)
        self.tokens = [self._plain.decode_bytes([token_id]) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_token_ids})
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else self._plain.eos_token

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        # Behind a line break, where the tokenizer would put a space before the text.
        for lead in ("", "\n"):
            ids: list[int] = self._backend.encode(lead + text, add_special_tokens=False).ids
            ends = list(accumulate(len(self.tokens[token_id]) for token_id in reversed(ids)))
            ids = ids[len(ids) - bisect_right(ends, len(wanted)) :]
            if b"".join([self.tokens[token_id] for token_id in ids]) == wanted:
                return ids
        return self._plain.greedy_tokenize(text)


class LLGuidanceMatcher:
    """See `runtime.grammar.grammar_backend.Matcher`."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        """Wrap the library's object."""
        self.inner = inner
        self._eos = eos_token_ids
        self._has_ended = False

    def accept(self, token_id: int) -> bool:
        """Move on by one token."""
        if self._has_ended:
            return False
        if token_id in self._eos:
            # Where nothing else may follow the library has stopped already, and takes no token.
            self._has_ended = self.inner.is_accepting()
            return self._has_ended
        return self.inner.try_consume_tokens([token_id]) == 1

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow any more."""
        return self._has_ended or (not self._eos and self.inner.is_stopped())


class LLGuidanceBackend:
    """See `runtime.grammar.grammar_backend.GrammarBackend`."""

    def __init__(self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Read the tokenizer's vocabulary."""
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        self._eos = frozenset(eos_token_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=eos_token_ids or None
        )

    def compile(self, spec: GrammarSpec) -> bytes:
        """Translate a constraint into the library's own form, and try it."""
        try:
            grammar = _TRANSLATE[spec.kind](spec.text)
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(_readable(str(error))) from None
        self._matcher(grammar)
        # Its masks are not computed ahead: a bound for what it will have derived some day.
        return with_size(grammar.encode(), _LOADED_PER_BYTE * len(grammar))

    def load(self, payload: bytes) -> LLMatcher:
        """Read a translated constraint."""
        try:
            return self._matcher(content_of(payload).decode())
        except UnicodeDecodeError:
            raise GrammarError("not a grammar") from None

    def start(self, compiled: LLMatcher) -> LLGuidanceMatcher:
        """Begin an output."""
        return LLGuidanceMatcher(compiled.deep_copy(), self._eos)

    def fill(self, matchers: Sequence[LLGuidanceMatcher], words: BitmaskRows) -> None:
        """Write which tokens may come next in each output.

        Raises:
            GrammarError: one of them went beyond a limit of the library.
        """
        address, row_bytes = words.ctypes.data, words.strides[0]
        for place, matcher in enumerate(matchers):
            matcher.inner.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)
            if matcher.inner.is_error():
                raise GrammarError(_readable(matcher.inner.get_error()))

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_readable(matcher.get_error()))
        return matcher


_TRANSLATE: dict[str, Callable[[str], str]] = {
    "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS),
    "regex": LLMatcher.grammar_from_regex,
    "ebnf": lambda text: LLMatcher.grammar_from_lark(text if is_lark(text) else gbnf_to_lark(text)),
    "structural_tag": lambda text: tag_to_grammar(text, _JSON_OPTIONS),
}


def _readable(message: str) -> str:
    # The library shows the place in its own translation below the message.
    lines = [line.strip() for line in message.split("\n   1 |")[0].splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_MESSAGE_CHARS].rstrip(".") or "not valid"
