"""The `xgrammar` library.

The library is large, so only the compiler process and the worker import this module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from runtime.grammar.blanks import MAX_BLANKS, BlankTokens
from runtime.grammar.cache import content_of, with_size
from runtime.grammar.grammar_backend import BitmaskRows, GrammarError, is_lark
from runtime.grammar.light_import import import_light
from runtime.grammar.xgrammar_schema import as_xgrammar_schema
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar
else:
    # The library's functions for tensors and for tokenizers of `transformers` are unused here. The
    # packages they need would cost the compiler's process a second and 200 MB. See decision 0049.
    xgrammar = import_light("xgrammar", "torch", "transformers")

# The position in the library's own sources at which it found the error.
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_CHECK = re.compile(r"Check failed: .*?is false: ")
_MAX_MESSAGE_CHARS = 300
_AS_WRITTEN, _AS_COMPILED, _AS_COMPILED_JSON, _AS_COMPILED_SHOWN = b"w", b"c", b"j", b"s"
# A constraint that compiles within this processor time is sent as text, and the worker compiles it
# again. The compiling thread does not block the scheduler's thread.
_COMPILE_AGAIN_S = 0.25


class XGrammarMatcher:
    """A `runtime.grammar.grammar_backend.Matcher` of xgrammar.

    Attributes:
        blanks: number of blanks at the end of the output, if it is bounded.
    """

    blanks = 0

    def __init__(self, inner: xgrammar.GrammarMatcher) -> None:
        """Wrap the library's object."""
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        """Move on by one token."""
        return self.inner.accept_token(token_id)

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that no token may follow."""
        return bool(self.inner.is_terminated())


class JsonMatcher(XGrammarMatcher):
    """Follows JSON, and counts its blanks."""

    def __init__(self, inner: xgrammar.GrammarMatcher, tokens: BlankTokens) -> None:
        """Wrap the library's object."""
        super().__init__(inner)
        self._run_after = tokens.run_after

    def accept(self, token_id: int) -> bool:
        """Move on by one token."""
        if not self.inner.accept_token(token_id):
            return False
        self.blanks = self._run_after(self.blanks, token_id)
        return True


class _Loaded(NamedTuple):
    grammar: xgrammar.CompiledGrammar
    is_json: bool


class XGrammarBackend:
    """xgrammar as a `runtime.grammar.grammar_backend.GrammarBackend`."""

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: list[int],
        compile_again_s: float = _COMPILE_AGAIN_S,
    ) -> None:
        """Read the tokenizer's vocabulary; see `_COMPILE_AGAIN_S`."""
        self._compile_again_s = compile_again_s
        backend = Tokenizer.from_folder(tokenizer_folder).backend
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(backend.to_str())
        vocab = [""] * vocab_size
        for text, token_id in backend.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size:
                vocab[token_id] = text
        # A token without characters is never text. Special tokens are hidden in most outputs, so
        # they must not match the characters that they are written with.
        shown, hidden = list(vocab), list(vocab)
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token.special and token_id < vocab_size:
                hidden[token_id] = ""
        for token_id in eos_token_ids:
            shown[token_id] = ""
        self._ends_by_itself = not eos_token_ids
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._hidden, self._shown = (
            xgrammar.TokenizerInfo(
                texts,
                vocab_type=found["vocab_type"],
                vocab_size=vocab_size,
                stop_token_ids=eos_token_ids or None,
                add_prefix_space=found["add_prefix_space"],
            )
            for texts in (hidden, shown)
        )
        self._blank_tokens = BlankTokens(self._hidden.decoded_vocab)

    def compile(self, spec: GrammarSpec) -> bytes:
        """Compile a constraint; call this in a process that may be killed.

        A constraint that compiles quickly is sent as its text: the serialized masks of a large
        vocabulary take many megabytes, and seconds.
        """
        if spec.kind == "ebnf" and is_lark(spec.text):
            raise GrammarError("%llguidance begins a grammar for --grammar-backend llguidance")
        began = time.process_time()
        compiled = self._compiled(spec)
        if time.process_time() - began < self._compile_again_s:
            content = _AS_WRITTEN + msgspec.msgpack.encode(spec)
        else:
            form = _AS_COMPILED_JSON if spec.kind == "json_schema" else _AS_COMPILED
            form = _AS_COMPILED_SHOWN if spec.shows_special else form
            content = form + str(compiled.serialize_json()).encode()
        return with_size(content, int(compiled.memory_size_bytes))

    def _compiled(self, spec: GrammarSpec) -> Any:
        vocabulary = self._shown if spec.shows_special else self._hidden
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        try:
            return self._compile(compiler, spec)
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(_readable(str(error))) from None

    @staticmethod
    def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> Any:
        match spec.kind:
            case "json_schema":
                schema = as_xgrammar_schema(orjson.loads(spec.text))
                return compiler.compile_json_schema(orjson.dumps(schema).decode())
            case "regex":
                return compiler.compile_regex(spec.text)
            case "ebnf":
                return compiler.compile_grammar(spec.text)
            case "structural_tag":
                return compiler.compile_structural_tag(*_structural_tag(spec.text))

    def load(self, payload: bytes) -> _Loaded:
        """Load a compiled grammar, or compile one that is known to be quick."""
        form, content = content_of(payload)[:1], content_of(payload)[1:]
        if form == _AS_WRITTEN:
            try:
                spec = msgspec.msgpack.decode(content, type=GrammarSpec)
            except msgspec.DecodeError as error:
                raise GrammarError(str(error)) from None
            return _Loaded(self._compiled(spec), spec.kind == "json_schema")
        vocabulary = self._shown if form == _AS_COMPILED_SHOWN else self._hidden
        try:
            grammar = xgrammar.CompiledGrammar.deserialize_json(content.decode(), vocabulary)
        except Exception as error:
            raise GrammarError(_readable(str(error))) from None
        return _Loaded(grammar, form == _AS_COMPILED_JSON)

    def start(self, compiled: _Loaded) -> XGrammarMatcher:
        """Begin an output."""
        matcher = xgrammar.GrammarMatcher(
            compiled.grammar, terminate_without_stop_token=self._ends_by_itself
        )
        if compiled.is_json:
            return JsonMatcher(matcher, self._blank_tokens)
        return XGrammarMatcher(matcher)

    def fill(self, matchers: Sequence[XGrammarMatcher], words: BitmaskRows) -> None:
        """Write which tokens are allowed next in each output."""
        self._batch.batch_fill_next_token_bitmask([each.inner for each in matchers], words)
        tokens = self._blank_tokens
        for place, matcher in enumerate(matchers):
            if matcher.blanks > tokens.free_run:
                tokens.bound(words[place], matcher.blanks)


def _structural_tag(text: str) -> tuple[Any, ...]:
    """Return the library's arguments for a tag with a `format`, or with structures and triggers."""
    tag = _with_schemas(orjson.loads(text))
    if "structures" not in tag:
        return (orjson.dumps(tag).decode(),)
    items = [
        xgrammar.StructuralTagItem(
            begin=each["begin"], schema=orjson.dumps(each["schema"]).decode(), end=each["end"]
        )
        for each in tag["structures"]
    ]
    return items, tag["triggers"]


def _with_schemas(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_schemas(each) for each in part]
    if not isinstance(part, dict):
        return part
    copy = {
        key: as_xgrammar_schema(value, part.get("style", "json"))
        if key in ("json_schema", "schema")
        else _with_schemas(value)
        for key, value in part.items()
    }
    if copy.get("type") == "json_schema":
        # Here the grammar itself has the bound, because blanks of the surrounding free text must
        # not be counted.
        copy.setdefault("max_whitespace_cnt", MAX_BLANKS)
    return copy


def _readable(message: str) -> str:
    text = _CHECK.sub("", _SOURCE_PLACE.sub("", message))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS].rstrip(".") or "not valid"
