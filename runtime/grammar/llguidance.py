"""The grammar library llguidance, which computes masks as the output grows, without preparation."""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from pathlib import Path

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from runtime.grammar.cache import content_of, with_size
from runtime.grammar.grammar_backend import BitmaskRows, GrammarError, is_lark
from runtime.grammar.llguidance_schema import as_llguidance_schema
from runtime.grammar.llguidance_tags import tag_to_grammar
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer

_MAX_MESSAGE_CHARS = 300
_LOADED_PER_BYTE = 32
_HIDES_SPECIAL, _SHOWS_SPECIAL = b"h", b"s"
# In the library's own grammar language, `<think>` stands for a token. This does not hold inside
# strings, regular expressions and comments, which this pattern also finds.
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|<[^<>\s]+>|//[^\n]*|/(?:\\.|[^/\\\n])+/')


def _limits() -> LLParserLimits:
    # A lexer state takes one or two kilobytes. Short error messages do not show other requests'
    # text.
    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class _Vocabulary:
    """A tokenizer in the form that the library needs. Added tokens are text, except special ones.

    If the library itself read the tokenizer's file, it would treat tags such as `<tool_call>` as
    special tokens because of their brackets. Such a token would be forbidden in free text, and
    allowed where the grammar requires its text.

    Attributes:
        tokens: bytes of each token.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._backend = tokenizer.backend
        # The text of a special token is encoded as plain text, not as this token.
        self._backend.encode_special_tokens = True
        self._plain = LLTokenizer(self._backend.to_str(), n_vocab=vocab_size, slices=[])
        self.tokens = [self._plain.decode_bytes([token_id]) for token_id in range(vocab_size)]
        for token_id, data in enumerate(self.tokens):
            # This is how the library writes an id that has no text.
            if data == b"<[%d]>" % token_id:
                self.tokens[token_id] = b""
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else self._plain.eos_token
        self._hide(tokenizer.special_ids | set(eos_token_ids))

    def _hide(self, token_ids: AbstractSet[int]) -> None:
        self.special_token_ids = sorted(token_ids)
        self._texts = list(self.tokens)
        for token_id in self.special_token_ids:
            # Such a tokenizer may encode text with special tokens, so these must have no text.
            self._texts[token_id] = b""
        self._ids_of_tags = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token_id not in token_ids
        }

    def showing_special(self, tokenizer: Tokenizer, eos_token_ids: list[int]) -> _Vocabulary:
        """Return a copy in which special tokens count as the text that they are written with.

        The copy uses the object `tokenizer`.
        """
        shown = copy.copy(self)
        shown._backend = tokenizer.backend
        shown._hide(set(eos_token_ids))
        return shown

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        # Some tokenizers put a space before the text. Then the text is encoded after a line break.
        for lead in ("", "\n"):
            ids: list[int] = self._backend.encode(lead + text, add_special_tokens=False).ids
            ends = list(accumulate(len(self._texts[token_id]) for token_id in reversed(ids)))
            ids = ids[len(ids) - bisect_right(ends, len(wanted)) :]
            if b"".join([self._texts[token_id] for token_id in ids]) == wanted:
                return ids
        return self._plain.greedy_tokenize(text)

    def by_number(self, lark: str) -> str:
        """Replace the names of added tokens in a grammar by their numbers.

        The library knows names of special tokens only.
        """

        def numbered(found: re.Match[str]) -> str:
            token_id = self._ids_of_tags.get(found[0])
            return found[0] if token_id is None else f"<[{token_id}]>"

        return _LARK_PARTS.sub(numbered, lark)


class LLGuidanceMatcher:
    """The position of one output in a grammar of llguidance; a `Matcher`."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        """Wrap a matcher of the library; `eos_token_ids` end an output."""
        self.inner = inner
        self._eos = eos_token_ids
        self._has_ended = False

    def accept(self, token_id: int) -> bool:
        """Advance by one token of the output; return false if the token is not allowed.

        Raises:
            GrammarError: the output exceeded a limit of the library.
        """
        if self._has_ended:
            return False
        if token_id in self._eos:
            # If nothing else may follow, the library has stopped already and accepts no token.
            self._has_ended = self.inner.is_accepting()
            return self._has_ended
        if self.inner.try_consume_tokens([token_id]) == 1:
            return True
        if self.inner.is_error():
            raise GrammarError(_readable(self.inner.get_error()))
        return False

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that no further token is allowed."""
        return self._has_ended or (not self._eos and self.inner.is_stopped())


class LLGuidanceBackend:
    """The library llguidance as a `GrammarBackend`."""

    def __init__(self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Read the vocabulary of a tokenizer; `vocab_size` is the width of the logits."""
        self._eos = frozenset(eos_token_ids)
        self._vocabulary = _Vocabulary(
            Tokenizer.from_folder(tokenizer_folder), vocab_size, eos_token_ids
        )
        # This tokenizer is a separate object, because the setting for special tokens belongs to it.
        shown = self._vocabulary.showing_special(
            Tokenizer.from_folder(tokenizer_folder), eos_token_ids
        )
        self._tokenizers = {
            form: LLTokenizer(
                TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=eos_token_ids or None
            )
            for form, vocabulary in ((_HIDES_SPECIAL, self._vocabulary), (_SHOWS_SPECIAL, shown))
        }

    def compile(self, spec: GrammarSpec) -> bytes:
        """Translate a grammar into the library's own language, and check that it can be loaded."""
        try:
            grammar = self._translated(spec)
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(_readable(str(error))) from None
        form = _SHOWS_SPECIAL if spec.shows_special else _HIDES_SPECIAL
        self._matcher(form, grammar)
        # Nothing is precomputed. The size is an upper limit of what the masks may need.
        return with_size(form + grammar.encode(), _LOADED_PER_BYTE * len(grammar))

    def _translated(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case "json_schema":
                schema = as_llguidance_schema(orjson.loads(spec.text))
                return LLMatcher.grammar_from_json_schema(orjson.dumps(schema).decode())
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
            case "ebnf":
                if is_lark(spec.text):
                    return LLMatcher.grammar_from_lark(self._vocabulary.by_number(spec.text))
                return LLMatcher.grammar_from_lark(gbnf_to_lark(spec.text))
            case "structural_tag":
                return tag_to_grammar(spec.text)

    def load(self, payload: bytes) -> LLMatcher:
        """Load a grammar from the result of `compile`."""
        form, content = content_of(payload)[:1], content_of(payload)[1:]
        try:
            return self._matcher(form, content.decode())
        except (KeyError, UnicodeDecodeError):
            raise GrammarError("not a grammar") from None

    def start(self, compiled: LLMatcher) -> LLGuidanceMatcher:
        """Return a matcher at the beginning of a loaded grammar, for a new output."""
        return LLGuidanceMatcher(compiled.deep_copy(), self._eos)

    def fill(self, matchers: Sequence[LLGuidanceMatcher], words: BitmaskRows) -> None:
        """Compute which tokens are allowed next in each output; see `GrammarBackend.fill`.

        Raises:
            GrammarError: an output exceeded a limit of the library.
        """
        address, row_bytes = words.ctypes.data, words.strides[0]
        for place, matcher in enumerate(matchers):
            matcher.inner.unsafe_compute_mask_ptr(address + place * row_bytes, row_bytes)
            if matcher.inner.is_error():
                raise GrammarError(_readable(matcher.inner.get_error()))

    def _matcher(self, form: bytes, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizers[form], grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_readable(matcher.get_error()))
        return matcher


def _readable(message: str) -> str:
    # After its message, the library shows a position in the translated grammar, which clients do
    # not know.
    message = message.replace("<non-verbose/>", "").split("\n   1 |")[0]
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_MESSAGE_CHARS].rstrip(".") or "not valid"
