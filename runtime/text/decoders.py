"""Decodes token ids to text as they arrive, never ending a text with half a character.

Joined together, the texts equal what the tokenizer decodes from all ids at once, with two intended
exceptions. An incomplete character at the very end is dropped. The second exception concerns byte
tokens: if invalid bytes follow valid characters, the library turns the whole run into U+FFFD. Here
the valid characters stay, because the stream has already shown them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.text.tokenizer import clean_up_spaces

REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = REPLACEMENT.encode()
# The most bytes of a character in UTF-8, and so the most byte tokens of a character.
_MAX_BYTES = 4
# If more tokens than this in a row do not decode to text, they are invalid and no longer held back.
_MAX_PENDING_TOKENS = 2 * _MAX_BYTES
# The longest pattern of `clean_up_spaces` has four characters: a space and three others.
_CLEAN_UP_REACH = 3

_utf8_decode: Callable[[bytes, str, bool], tuple[str, int]] = codecs.utf_8_decode


class TextDecoder(Protocol):
    """Decodes the token ids of one stream as they arrive."""

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is final now."""
        ...

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; return the text that is final now."""
        ...

    def finish(self) -> str:
        """Return the text that is still held back; an incomplete character is dropped."""
        ...


class PieceTable(dict[int, "str | bytes"]):
    """A table of each id's piece of text; a piece is made on first use.

    A piece is a `str`, or `bytes` if it has an incomplete character. The table suits tokenizers
    that decode each token on its own and join the bytes.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], *, byte_by_byte: bool) -> None:
        """Begin with an empty table.

        Args:
            piece_bytes: returns the bytes of an id; empty for unknown and for hidden ids.
            byte_by_byte: whether the tokenizer shows each invalid byte as U+FFFD, instead of each
                invalid sequence.
        """
        super().__init__()
        self._piece_bytes = piece_bytes
        self.byte_by_byte = byte_by_byte

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._piece_bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece

    def join(self, token_ids: Sequence[int]) -> bytes:
        """Return the joined bytes of several ids."""
        pieces = [self[token_id] for token_id in token_ids]
        return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])


class PieceDecoder:
    """Joins pieces of a `PieceTable`: one look-up per token, however long the text is."""

    __slots__ = ("_borrowed", "_pending", "_strip", "_table")

    def __init__(self, table: PieceTable, prompt_tail: Sequence[int], strip_first: str) -> None:
        """Continue the text of `prompt_tail`.

        Args:
            table: pieces of the tokenizer.
            prompt_tail: the last ids of the prompt; only an incomplete character at their end
                matters.
            strip_first: a character that the tokenizer drops at the start of the whole text.
        """
        self._table = table
        context = table.join(prompt_tail)
        self._pending = _incomplete_tail(context)
        # Bytes of an incomplete character of the prompt, which the output may complete.
        self._borrowed = len(self._pending)
        self._strip = strip_first if not context else ""

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is final now."""
        piece = self._table[token_id]
        if isinstance(piece, str):
            if not self._pending and not self._strip:
                return piece
            piece = piece.encode()
        return self._join(piece)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; return the text that is final now."""
        return self._join(self._table.join(token_ids))

    def finish(self) -> str:
        """Drop an incomplete character; nothing else is held back."""
        self._pending = b""
        return ""

    def _join(self, data: bytes) -> str:
        if not data:
            return ""
        data = self._pending + data
        text, self._pending = _decode(data, self._table.byte_by_byte)
        if not text:
            return ""
        if self._borrowed:
            # If the output does not complete the prompt's character, the prompt's bytes are
            # dropped. A completed character may be U+FFFD itself.
            if text.startswith(REPLACEMENT) and not data.startswith(_REPLACEMENT_BYTES):
                text, self._pending = _decode(data[self._borrowed :], self._table.byte_by_byte)
            self._borrowed = 0
        if self._strip and text:
            text = text.removeprefix(self._strip)
            self._strip = ""
        return text


def _incomplete_tail(data: bytes) -> bytes:
    data = data[-_MAX_BYTES:]
    _, used = _utf8_decode(data, "replace", False)
    rest = data[used:]
    return b"" if _is_surrogate_half(rest) else rest


def _is_surrogate_half(rest: bytes) -> bool:
    # These two bytes can only begin an encoded surrogate, which is invalid, but Python waits for
    # the third byte.
    return len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0


def _decode(data: bytes, byte_by_byte: bool) -> tuple[str, bytes]:
    """Return the text of `data`, and the bytes of an incomplete character at its end."""
    parts = []
    while True:
        try:
            text, used = _utf8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            broken_len = error.end - error.start
            parts.append(data[: error.start].decode())
            parts.append(REPLACEMENT * (broken_len if byte_by_byte else 1))
            data = data[error.end :]
        else:
            parts.append(text)
            rest = data[used:]
            if not _is_surrogate_half(rest):
                return "".join(parts), rest
            return "".join([*parts, REPLACEMENT, REPLACEMENT]), b""


class WindowDecoder:
    """Decodes the last tokens together with a few earlier ones, and returns the new text.

    It works for any tokenizer.

    Source: the prefix and read offsets of Hugging Face text-generation-inference.
    """

    __slots__ = ("_decode", "_ids", "_keeps", "_read", "_splits_characters")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        keeps: Callable[[int], bool],
        prompt_tail: Sequence[int],
        *,
        splits_characters: bool,
    ) -> None:
        """Continue the text of `prompt_tail`.

        Args:
            decode: the tokenizer's decode, including special tokens.
            keeps: returns whether an id has text to show: it is known and not a hidden special
                token.
            prompt_tail: the last ids of the prompt.
            splits_characters: whether a token may have only a part of a character, so that U+FFFD
                at the end means an incomplete character.
        """
        self._decode = decode
        self._keeps = keeps
        self._splits_characters = splits_characters
        # Hidden tokens are left out, because a window of only hidden tokens would have no text as
        # context.
        self._ids = [token_id for token_id in prompt_tail if keeps(token_id)]
        if splits_characters and REPLACEMENT in decode(self._ids):
            # Half a character at either end of the context would corrupt the text after it.
            self._ids = []
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is final now."""
        return self.extend((token_id,))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; return the text that is final now."""
        added = [token_id for token_id in token_ids if self._keeps(token_id)]
        if self._splits_characters:
            # The ids are added one by one. Otherwise half a character at the end would hold back
            # the text of all of them.
            return "".join([self._extend([token_id]) for token_id in added])
        return self._extend(added) if added else ""

    def _extend(self, added: list[int]) -> str:
        self._ids += added
        text = self._new_text()
        num_pending = len(self._ids) - self._read
        if (
            self._splits_characters
            and text.endswith(REPLACEMENT)
            and num_pending < _MAX_PENDING_TOKENS
        ):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return text

    def finish(self) -> str:
        """Return the text that is still held back, without an incomplete character."""
        if self._read == len(self._ids):
            return ""
        text = self._new_text().rstrip(REPLACEMENT)
        self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(shown) :]


class CleanedDecoder:
    """Applies `clean_up_spaces` to another decoder's text; holds back what may still change."""

    __slots__ = ("_held", "_inner")

    def __init__(self, inner: TextDecoder) -> None:
        """Clean the text of the decoder `inner`."""
        self._inner = inner
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is final now."""
        return self._clean(self._inner.push(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; return the text that is final now."""
        return self._clean(self._inner.extend(token_ids))

    def finish(self) -> str:
        """Return the text that is still held back."""
        text = clean_up_spaces(self._held + self._inner.finish())
        self._held = ""
        return text

    def _clean(self, text: str) -> str:
        text = self._held + text
        # Every pattern is a space and up to three further characters, and clean-up only removes
        # spaces. So no pattern crosses a position whose three previous characters are no spaces.
        for border in range(len(text), _CLEAN_UP_REACH - 1, -1):
            if " " not in text[border - _CLEAN_UP_REACH : border]:
                self._held = text[border:]
                return clean_up_spaces(text[:border])
        self._held = text
        return ""
