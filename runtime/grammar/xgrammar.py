"""The grammar library xgrammar.

Importing the library is expensive, so only the compiler process and the worker import this module.
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
    # Only the library's functions for tensors and for tokenizers of `transformers` need these
    # packages, and they are not used here. The packages would cost the compiler process a second
    # and 200 MB. See decision 0049.
    xgrammar = import_light("xgrammar", "torch", "transformers")

# The place in the library's source code that an error message begins with.
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_CHECK = re.compile(r"Check failed: .*?is false: ")
_MAX_MESSAGE_CHARS = 300
_AS_WRITTEN, _AS_COMPILED, _AS_COMPILED_JSON, _AS_COMPILED_SHOWN = b"w", b"c", b"j", b"s"
# A grammar that compiles within this CPU time is sent as text, and the worker compiles it again.
# The worker does so on a thread that does not block the scheduler's thread.
_COMPILE_AGAIN_S = 0.25


class XGrammarMatcher:
    """The position of one output in a grammar of xgrammar; a `Matcher`.

    Attributes:
        blanks: number of blanks at the end of the output, if their number is limited; else 0.
    """

    blanks = 0

    def __init__(self, inner: xgrammar.GrammarMatcher) -> None:
        """Wrap a matcher of the library."""
        self.inner = inner

    def accept(self, token_id: int) -> bool:
        """Advance by one token of the output; return false if the token is not allowed."""
        return self.inner.accept_token(token_id)

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that no further token is allowed."""
        return bool(self.inner.is_terminated())


class JsonMatcher(XGrammarMatcher):
    """A matcher for JSON, which also counts the blanks at the end of the output."""

    def __init__(self, inner: xgrammar.GrammarMatcher, tokens: BlankTokens) -> None:
        """Wrap a matcher of the library; `tokens` counts the blanks of each token."""
        super().__init__(inner)
        self._run_after = tokens.run_after

    def accept(self, token_id: int) -> bool:
        """Advance by one token of the output; return false if the token is not allowed."""
        if not self.inner.accept_token(token_id):
            return False
        self.blanks = self._run_after(self.blanks, token_id)
        return True


class _Loaded(NamedTuple):
    grammar: xgrammar.CompiledGrammar
    is_json: bool


class XGrammarBackend:
    """The library xgrammar as a `GrammarBackend`."""

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: list[int],
        compile_again_s: float = _COMPILE_AGAIN_S,
    ) -> None:
        """Read the vocabulary of a tokenizer.

        Args:
            tokenizer_folder: folder of the tokenizer.
            vocab_size: width of the logits.
            eos_token_ids: token ids that end an output.
            compile_again_s: CPU time in seconds. A grammar that compiles faster is sent as text,
                and the worker compiles it again.
        """
        self._compile_again_s = compile_again_s
        backend = Tokenizer.from_folder(tokenizer_folder, encodes=False).backend
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(backend.to_str())
        vocab = [""] * vocab_size
        for text, token_id in backend.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size:
                vocab[token_id] = text
        # The library never matches a token without characters. Special tokens are hidden in most
        # outputs, so there they must not match the characters that they are written with.
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
        """Compile a grammar, in a process that may be killed if this takes too long.

        If it is quick, the result is the text of the grammar. The compiled form has many megabytes
        for a large vocabulary, and takes seconds to write.
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
        """Load a compiled grammar, or compile one whose compilation is known to be quick."""
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
        """Return a matcher at the beginning of a loaded grammar, for a new output."""
        matcher = xgrammar.GrammarMatcher(
            compiled.grammar, terminate_without_stop_token=self._ends_by_itself
        )
        if compiled.is_json:
            return JsonMatcher(matcher, self._blank_tokens)
        return XGrammarMatcher(matcher)

    def fill(self, matchers: Sequence[XGrammarMatcher], words: BitmaskRows) -> None:
        """Compute which tokens are allowed next in each output; see `GrammarBackend.fill`."""
        self._batch.batch_fill_next_token_bitmask([each.inner for each in matchers], words)
        tokens = self._blank_tokens
        for place, matcher in enumerate(matchers):
            if matcher.blanks > tokens.free_run:
                tokens.bound(words[place], matcher.blanks)


def _structural_tag(text: str) -> tuple[Any, ...]:
    """Return the library's arguments for a structural tag.

    The tag has either `format`, or `structures` and `triggers`.
    """
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
        # Here the limit on blanks is a part of the grammar, because blanks in the free text around
        # the JSON must not be counted.
        copy.setdefault("max_whitespace_cnt", MAX_BLANKS)
    return copy


def _readable(message: str) -> str:
    text = _CHECK.sub("", _SOURCE_PLACE.sub("", message))
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS].rstrip(".") or "not valid"
