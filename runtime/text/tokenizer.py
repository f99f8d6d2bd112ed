"""Turns text into token ids and back, as `transformers.AutoTokenizer` does, without torch.

The `tokenizers` library does the work. This file adds what `transformers` adds to it: the tokens
and the clean-up of `tokenizer_config.json`, the names of special tokens, and the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.json_file import read_json_object
from runtime.errors import InvalidRequest, StartupError
from runtime.text.chat_template_files import read_chat_template
from runtime.text.encoding import POOL, TextEncoder
from runtime.text.gguf_tokenizer import gguf_tokenizer
from runtime.text.tokenizer_conversion import converted_tokenizer_file

# A greater length means no limit; `transformers` writes 1e30 for that.
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
# The replacements of `clean_up_tokenization` in `transformers`, in its order.
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

# Decoding so many ids takes about a millisecond; switching to a thread takes a twentieth of that.
_INLINE_IDS = 1024

_MISSING = "This server has no tokenizer (--skip-tokenizer-init): send input_ids, read output_ids."


def clean_up_spaces(text: str) -> str:
    """Remove the spaces that word-based tokenizers leave before punctuation and contractions."""
    for spaced, tight in _CLEAN_UPS:
        text = text.replace(spaced, tight)
    return text


class Tokenizer(TextEncoder):
    """A loaded tokenizer; several threads may use it.

    Attributes:
        backend: the tokenizer of the `tokenizers` library, for the detokenizer.
        vocab_size: number of tokens, including added ones; the model may have more logits.
        model_max_length: longest input that the tokenizer's files state; `None` if they state none.
        chat_template: the Jinja source, or several sources by name, as in `transformers`.
        response_template: the folder's description of how the model writes answers; may be empty.
        special_ids: ids that `skip_special_tokens` hides.
        cleans_up_spaces: whether decoded text goes through `clean_up_spaces`.
    """

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        """Wrap a tokenizer of the library; `config` is the content of `tokenizer_config.json`."""
        # A saved tokenizer may cut texts, as it did in training, but requests must not be cut.
        backend.no_truncation()
        backend.no_padding()
        _add_configured_tokens(backend, config)
        self._names = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
        _add_configured_template(backend, config, self.bos_token, self.eos_token)
        super().__init__(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.model_max_length = _plausible_length(config.get("model_max_length"))
        self.chat_template = chat_template
        described = config.get("response_template")
        self.response_template: dict[str, Any] = described if isinstance(described, dict) else {}
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        # Clean-up is off for BPE, whose spaces are parts of tokens and would be lost.
        self.cleans_up_spaces = bool(config.get("clean_up_tokenization_spaces")) and (
            type(backend.model).__name__ != "BPE"
            or bool(
                config.get(
                    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
                )
            )
        )

    @classmethod
    def from_folder(cls, folder: Path, *, encodes: bool = True) -> Tokenizer:
        """Load the tokenizer of a model folder or of a GGUF file.

        Args:
            folder: the folder or the file.
            encodes: whether text will be encoded; if not, the tokenizer may be smaller.

        Raises:
            StartupError: there is no tokenizer, or it cannot be read.
        """
        folder = Path(folder)
        if is_gguf(folder):
            return cls(*gguf_tokenizer(folder, encodes=encodes))
        path = folder / "tokenizer.json"
        if not path.is_file():
            path = converted_tokenizer_file(folder)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise StartupError(f"Cannot read the tokenizer {path}: {error}") from error
        try:
            config = _read_config(folder)
            return cls(backend, config, read_chat_template(folder, config))
        except StartupError:
            raise
        # The files' keys may have any value, and the library raises bare Exception.
        except Exception as error:
            raise StartupError(
                f"The tokenizer's files in {folder} (tokenizer_config.json, chat templates, ...) "
                f"cannot be used: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    @classmethod
    def without_vocabulary(cls) -> Tokenizer:
        """Return a tokenizer that refuses text, for a server that uses only token ids."""
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
        """Text of the token that begins a sequence; `None` if there is none."""
        return self._names["bos_token"]

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence; `None` if there is none."""
        return self._names["eos_token"]

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token; `None` if there is none."""
        return self._names["pad_token"]

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence; `None` if there is none."""
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence; `None` if there is none."""
        return self._id_of(self.eos_token)

    @property
    def turn_end_ids(self) -> list[int]:
        """Ids of the tokens that end a turn, as in SGLang.

        They are the end-of-sequence token, and `<|eom_id|>`, with which Llama 3 ends a tool call.
        """
        found = (self.eos_token_id, self.backend.token_to_id("<|eom_id|>"))
        return [each for each in found if each is not None]

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; `None` if there is none."""
        return self._id_of(self.pad_token)

    @property
    def named_tokens(self) -> dict[str, str]:
        """Texts of `bos_token`, `eos_token`, `unk_token` and so on, by these names."""
        return {name: text for name, text in self._names.items() if text is not None}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it (`Ġhello`); empty for an unknown id."""
        if not 0 <= token_id < 2**32:
            return ""
        return self.backend.id_to_token(token_id) or ""

    # ---- token ids to text (`TextEncoder` has the other direction) ----

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,  # noqa: ARG002
    ) -> str:
        """Return the text of token ids; ids outside the vocabulary have no text.

        `spaces_between_special_tokens` is a parameter of the API and has no effect. As with the
        fast tokenizers of `transformers`, there are never spaces between special tokens.

        Raises:
            InvalidRequest: an id is not an unsigned 32-bit number.
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
            InvalidRequest: an id is not an unsigned 32-bit number.
        """
        try:
            # This function releases the GIL; the library's function for one sequence does not.
            texts = self.backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"Token ids must be integers in [0, 2**32): {error}.") from error
        return [clean_up_spaces(text) if self.cleans_up_spaces else text for text in texts]


async def decode_texts(
    tokenizer: Tokenizer, sequences: Sequence[list[int]], *, skip_special_tokens: bool = True
) -> list[str]:
    """Return the text of each sequence of token ids; many ids are decoded on a thread."""
    if sum(map(len, sequences)) + len(sequences) <= _INLINE_IDS:
        return tokenizer.decode_batch(sequences, skip_special_tokens)
    return await POOL.run(tokenizer.decode_batch, sequences, skip_special_tokens)


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


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json")
    # As in `transformers`, `special_tokens_map.json` takes precedence only if the other file has no
    # list of added tokens.
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
    # tokens with a number come first, by number, then named tokens, then extra ones.
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
    # BOS. DeepSeek-V3 does, and its answers are worse without BOS.
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
