"""Chooses how token ids are decoded: by a table of pieces if that is exact, else by the library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from runtime.text.decoders import (
    CleanedDecoder,
    PieceDecoder,
    PieceTable,
    TextDecoder,
    WindowDecoder,
)
from runtime.text.tokenizer import Tokenizer

# A byte token. The library also accepts a sign in place of the first digit.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_UINT32_END = 2**32


class DecoderFactory:
    """Makes a decoder for each stream; parts that streams share are made once."""

    def __init__(self, tokenizer: Tokenizer, *, always_window: bool = False) -> None:
        """Choose the kind of decoder for a tokenizer; with `always_window`, it is `window`."""
        self._backend = tokenizer.backend
        self._special_ids = tokenizer.special_ids
        self._cleans_up = tokenizer.cleans_up_spaces
        spec = _decoder_spec(self._backend.decoder)
        self._splits_characters = any(
            step["type"] in ("ByteLevel", "ByteFallback") for step in spec
        )
        self._strip_first = ""
        self._tables: dict[bool, PieceTable] | None = None
        translate = None if always_window else self._translation(spec)
        if translate is not None:
            self._tables = {
                skip: PieceTable(
                    self._piece_source(translate, skip),
                    byte_by_byte=spec[0]["type"] != "ByteLevel",
                )
                for skip in (False, True)
            }

    @property
    def kind(self) -> str:
        """Kind of the decoders, for the log: `table` or `window`."""
        return "window" if self._tables is None else "table"

    def create(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int] = ()) -> TextDecoder:
        """Return a decoder for one stream, whose text continues that of the ids `prompt_tail`."""
        decoder: TextDecoder
        if self._tables is not None:
            decoder = PieceDecoder(
                self._tables[skip_special_tokens], prompt_tail, self._strip_first
            )
        else:
            keeps = self._is_shown if skip_special_tokens else self._is_known
            decoder = WindowDecoder(
                self._decode, keeps, prompt_tail, splits_characters=self._splits_characters
            )
        return CleanedDecoder(decoder) if self._cleans_up else decoder

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token, special or not; empty for an unknown id."""
        if self._tables is not None:
            return self._tables[False].join([token_id])
        return self._decode([token_id]).encode() if self._is_known(token_id) else b""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < _UINT32_END and self._backend.id_to_token(token_id) is not None

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._is_known(token_id)

    def _piece_source(
        self, translate: Callable[[str], bytes], skip_special_tokens: bool
    ) -> Callable[[int], bytes]:
        is_shown = self._is_shown if skip_special_tokens else self._is_known

        def piece_bytes(token_id: int) -> bytes:
            return (
                translate(self._backend.id_to_token(token_id) or "") if is_shown(token_id) else b""
            )

        return piece_bytes

    def _translation(self, spec: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
        types = [step["type"] for step in spec]
        if types == ["ByteLevel"]:
            return _byte_level_translation()
        # Llama 2's decoder replaces texts, joins byte tokens and strips one space at the start.
        num_replaces = 0
        while types[num_replaces : num_replaces + 1] == ["Replace"]:
            num_replaces += 1
        replaces, rest = spec[:num_replaces], spec[num_replaces:]
        if any("String" not in step["pattern"] for step in replaces):
            return None
        rest_types = types[num_replaces:]
        if rest_types == ["ByteFallback", "Fuse", "Strip"]:
            strip = rest[-1]
            if strip["start"] != 1 or strip["stop"] != 0:
                return None
            self._strip_first = strip["content"]
        elif rest_types not in (["ByteFallback", "Fuse"], ["ByteFallback"]):
            return None
        return _byte_fallback_translation(
            [(step["pattern"]["String"], step["content"]) for step in replaces]
        )


def _decoder_spec(decoder: Any) -> list[dict[str, Any]]:
    # The settings of the library's decoder can be read only from its serialized state.
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _byte_level_translation() -> Callable[[str], bytes]:
    # GPT-2's alphabet: a printable Latin-1 character stands for its own byte, and the characters
    # from U+0100 on stand for the other bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}

    def translate(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            # The token is not in the alphabet, so it is an added token, which is plain text.
            return token.encode()

    return translate


def _byte_fallback_translation(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def translate(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    return translate
