"""Text to token ids and back, as `transformers.AutoTokenizer` does it, without importing torch.

The `tokenizers` library does the work. This file adds what `transformers` adds to it: the tokens
and the clean-up of `tokenizer_config.json`, the special tokens' names, the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.json_file import read_json_object
from runtime.errors import InvalidRequest, StartupError
from runtime.text.chat_template_files import read_chat_template
from runtime.text.gguf_tokenizer import gguf_tokenizer
from runtime.text.tokenizer_conversion import converted_tokenizer_file

# No context is this long: `transformers` writes 1e30 for a tokenizer without a limit.
_MAX_PLAUSIBLE_LENGTH = 10**9
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The replacements of `transformers`' clean_up_tokenization, in its order.
_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


_MISSING = "This server has no tokenizer (--skip-tokenizer-init): send input_ids, read output_ids."


def clean_up_spaces(text: str) -> str:
    """Drop the spaces that word-based tokenizers leave before punctuation and contractions."""
    for spaced, tight in _CLEAN_UPS:
        text = text.replace(spaced, tight)
    return text


class Tokenizer:
    """A loaded tokenizer; safe to use from several threads.

    Attributes:
        backend: the library's object, for the detokenizer.
        vocab_size: number of tokens, including added ones; the logits may be wider.
        model_max_length: longest input that the tokenizer's files state; `None` if they state none.
        chat_template: the Jinja text, or texts by name if there are several; like
            `transformers`.
        response_template: the folder's description of how the model writes answers, or empty.
        special_ids: ids that `skip_special_tokens` hides.
        cleans_up_spaces: whether decoded text goes through `clean_up_spaces`.
    """

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        """Wrap `backend` by `config`, the content of `tokenizer_config.json`; see `from_folder`."""
        self.backend = backend
        # A saved file may have settings from its training, but requests must never be cut silently.
        backend.no_truncation()
        backend.no_padding()
        _add_configured_tokens(backend, config)
        self._names = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
        _add_configured_template(backend, config, self.bos_token, self.eos_token)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.model_max_length = _plausible_length(config.get("model_max_length"))
        self.chat_template = chat_template
        described = config.get("response_template")
        self.response_template: dict[str, Any] = described if isinstance(described, dict) else {}
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        # A text after this token is in the middle of a prompt; the token never merges with it.
        self._guard = next(
            (
                token.content
                for token in added.values()
                if token.special and not (token.rstrip or token.single_word)
            ),
            None,
        )
        # Clean-up is destructive for BPE, whose spaces are part of its tokens.
        self.cleans_up_spaces = bool(config.get("clean_up_tokenization_spaces")) and (
            type(backend.model).__name__ != "BPE"
            or bool(
                config.get(
                    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
                )
            )
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model folder, or of a GGUF file.

        Raises:
            StartupError: no tokenizer there that can be read.
        """
        folder = Path(folder)
        if is_gguf(folder):
            return cls(*gguf_tokenizer(folder))
        path = folder / "tokenizer.json"
        if not path.is_file():
            path = converted_tokenizer_file(folder)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"Cannot read the tokenizer {path}: {error}") from error
        try:
            config = _read_config(folder)
            return cls(backend, config, read_chat_template(folder, config))
        except StartupError:
            raise
        # Any key may have any value, and the library raises bare Exception.
        except Exception as error:
            raise StartupError(
                f"The tokenizer's files in {folder} (tokenizer_config.json, chat templates, ...) "
                f"cannot be used: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    @classmethod
    def without_vocabulary(cls) -> Tokenizer:
        """Return a tokenizer without text, for a server that uses only token ids."""
        return _NoTokenizer(Backend(WordLevel({}, unk_token="")), {})

    @property
    def is_missing(self) -> bool:
        """Whether there is no vocabulary, so that text cannot be used."""
        return False

    def check_present(self) -> None:
        """Refuse a request that needs text.

        Raises:
            InvalidRequest: there is no vocabulary.
        """

    # ---- names ----

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self._names["bos_token"]

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self._names["eos_token"]

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token."""
        return self._names["pad_token"]

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence."""
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence."""
        return self._id_of(self.eos_token)

    @property
    def turn_end_ids(self) -> list[int]:
        """Ids of the tokens that end a turn, the same as in SGLang.

        They are the end of a sequence, and Llama 3's end of a message that calls a tool.
        """
        found = (self.eos_token_id, self.backend.token_to_id("<|eom_id|>"))
        return [each for each in found if each is not None]

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return self._id_of(self.pad_token)

    @property
    def named_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, `unk_token` and so on, as chat templates see them."""
        return {name: text for name, text in self._names.items() if text is not None}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token (`Ġhello`); empty for an unknown id."""
        if not 0 <= token_id < 2**32:
            return ""
        return self.backend.id_to_token(token_id) or ""

    # ---- text to ids ----

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of `text`; by default with the tokenizer's own BOS and EOS rule.

        Raises:
            InvalidRequest: `text` holds half a surrogate pair, which no encoding can carry.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        check_length: Callable[[int], object] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Return token ids of each text; the library releases the GIL meanwhile.

        Args:
            texts: any number.
            add_special_tokens: whether the tokenizer's own BOS and EOS rule applies.
            check_length: called with the number of each text's tokens; raises to refuse. It runs
                before the ids become Python integers, which holds the GIL for 20 milliseconds per
                million ids.
            most: most tokens of a text, including those that the tokenizer adds. A longer text is
                cut, but its closing tokens stay.

        Raises:
            InvalidRequest: a text holds half a surrogate pair.
        """
        _refuse_surrogates(texts)
        # The `fast` variant skips character offsets, which are unused here. It takes a third less
        # time.
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        if check_length is not None:
            for encoding in encodings:
                check_length(len(encoding))
        if most is not None:
            return [
                encoding.ids if len(encoding) <= most else self._cut(most, text).ids
                for text, encoding in zip(texts, encodings, strict=True)
            ]
        return [encoding.ids for encoding in encodings]

    def encode_inner(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of texts inside another text, independent of the text before them.

        Some tokenizers write a space before the text that begins a prompt, but not before these
        texts. Tokenizers that write one after every special token do so here as well.

        Raises:
            InvalidRequest: a text holds half a surrogate pair.
        """
        guard = self._guard
        if guard is None:
            return self.encode_batch(texts, add_special_tokens=False)
        encoded = self.encode_batch([guard + text for text in texts], add_special_tokens=False)
        return [ids[1:] for ids in encoded]

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        check_length: Callable[[int], object] | None = None,
        most: int | None = None,
    ) -> list[tuple[list[int], int]]:
        """Return token ids of pairs of texts, in the form that models of pairs are trained on.

        Args:
            pairs: any number.
            check_length: see `encode_batch`.
            most: see `encode_batch`; the longer text of a pair is cut first.

        Returns:
            For each pair its ids, and how many of them belong to the first text; 0 if the tokenizer
            does not distinguish the texts.

        Raises:
            InvalidRequest: a text holds half a surrogate pair.
        """
        for pair in pairs:
            _refuse_surrogates(pair)
        # The `fast` variant does not distinguish the two texts if no template joins them.
        encodings = self.backend.encode_batch(list(pairs), add_special_tokens=True)
        if check_length is not None:
            for encoding in encodings:
                check_length(len(encoding))
        if most is not None:
            encodings = [
                encoding if len(encoding) <= most else self._cut(most, *pair)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [
            (encoding.ids, types.index(1) if 1 in (types := encoding.type_ids) else 0)
            for encoding in encodings
        ]

    def _cut(self, most: int, text: str, second: str | None = None) -> Encoding:
        """Cut a text or a pair to `most` tokens as `transformers` does: the longer text first."""
        texts = [text] if second is None else [text, second]
        parts = self.backend.encode_batch(texts, add_special_tokens=False)
        room = max(0, most - self.backend.num_special_tokens_to_add(second is not None))
        for part, kept in zip(parts, _kept(room, [len(part) for part in parts]), strict=True):
            part.truncate(kept)
        return self.backend.post_process(parts[0], parts[1] if second is not None else None)

    # ---- ids to text ----

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,  # noqa: ARG002
    ) -> str:
        """Return the text of token ids; ids outside the vocabulary have no text.

        `spaces_between_special_tokens` is accepted because it is part of the API, but ignored: like
        the fast tokenizers of `transformers`, this one never puts spaces between special tokens.

        Raises:
            InvalidRequest: an id that is not an unsigned 32-bit number.
        """
        try:
            text = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"Token ids must be integers in [0, 2**32): {error}.") from error
        return clean_up_spaces(text) if self.cleans_up_spaces else text

    def decode_batch(
        self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each sequence of token ids.

        Raises:
            InvalidRequest: an id that is not an unsigned 32-bit number.
        """
        try:
            # Unlike the library's function for one sequence, this releases the GIL.
            texts = self.backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"Token ids must be integers in [0, 2**32): {error}.") from error
        return [clean_up_spaces(text) if self.cleans_up_spaces else text for text in texts]


class _NoTokenizer(Tokenizer):
    @property
    def is_missing(self) -> bool:
        return True

    def check_present(self) -> None:
        raise InvalidRequest(_MISSING)

    def encode_batch(
        self,
        texts: Sequence[str],  # noqa: ARG002  # the base class's parameters
        add_special_tokens: bool = True,  # noqa: ARG002
        check_length: Callable[[int], object] | None = None,  # noqa: ARG002
        most: int | None = None,  # noqa: ARG002
    ) -> list[list[int]]:
        raise InvalidRequest(_MISSING)

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],  # noqa: ARG002
        check_length: Callable[[int], object] | None = None,  # noqa: ARG002
        most: int | None = None,  # noqa: ARG002
    ) -> list[tuple[list[int], int]]:
        raise InvalidRequest(_MISSING)

    def decode(
        self,
        ids: Sequence[int],  # noqa: ARG002
        skip_special_tokens: bool = True,  # noqa: ARG002
        spaces_between_special_tokens: bool = True,  # noqa: ARG002
    ) -> str:
        raise InvalidRequest(_MISSING)

    def decode_batch(
        self,
        batch: Sequence[Sequence[int]],  # noqa: ARG002
        skip_special_tokens: bool = True,  # noqa: ARG002
    ) -> list[str]:
        raise InvalidRequest(_MISSING)


def _kept(room: int, lengths: Sequence[int]) -> Sequence[int]:
    """Return how many tokens to keep of a text, or of two: the longer is shortened first."""
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    kept = shorter, room - shorter
    return kept if lengths[0] <= lengths[1] else kept[::-1]


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text is not valid Unicode: half a surrogate pair at character {error.start}."
            ) from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json")
    # `transformers` prefers the older file only if the newer one lists no added tokens.
    return {**named, **config} if "added_tokens_decoder" in config else {**config, **named}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _plausible_length(value: Any) -> int | None:
    if isinstance(value, int | float) and 0 < value < _MAX_PLAUSIBLE_LENGTH:
        return int(value)
    return None


def _added_token(value: dict[str, Any], special: bool) -> AddedToken:
    flags = {key: bool(value[key]) for key in ("lstrip", "rstrip", "single_word") if key in value}
    special = bool(value.get("special", special))
    normalized = bool(value.get("normalized", not special))
    return AddedToken(value["content"], special=special, normalized=normalized, **flags)


def _add_configured_tokens(backend: Backend, config: dict[str, Any]) -> None:
    # The order decides the ids of tokens that are new to the vocabulary. As in `transformers`,
    # numbered tokens come first, by id, then named ones, then extra ones.
    numbered = config.get("added_tokens_decoder") or {}
    tokens = [_added_token(numbered[key], False) for key in sorted(numbered, key=int)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known.update(token.content for token in tokens)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = list(extra.values())
    for value in [*(config.get(name) for name in _NAMED_TOKENS), *extra]:
        text = _token_text(value)
        if text is None or text in known:
            continue
        known.add(text)
        tokens.append(_added_token(value if isinstance(value, dict) else {"content": text}, True))
    backend.add_tokens(tokens)


def _add_configured_template(
    backend: Backend, config: dict[str, Any], bos: str | None, eos: str | None
) -> None:
    processor = backend.post_processor
    if processor is not None and processor.num_special_tokens_to_add(False) > 0:
        return
    # Checkpoints of the Llama family may rely on the tokenizer class of `transformers` 4 to add
    # BOS. DeepSeek-V3 does, and its answers degrade without BOS.
    first = bos if config.get("add_bos_token") is True else None
    last = eos if config.get("add_eos_token") is True else None
    if first is None and last is None:
        return
    pieces = [first, "$A", last]
    template = processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        special_tokens=[
            (token, backend.token_to_id(token)) for token in {first, last} if token is not None
        ],
    )
    backend.post_processor = (
        template if processor is None else processors.Sequence([processor, template])
    )
