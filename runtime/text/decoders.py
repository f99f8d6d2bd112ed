"""Incremental decoding of ids to text that never ends with half a character.

The concatenated text is the tokenizer's own decode of all ids, with two intended exceptions. An
incomplete character at the very end is dropped. Valid characters stay if byte tokens after them are
invalid: the library turns the whole run into U+FFFD, but a stream has already shown the valid ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.text.tokenizer import clean_up_spaces

REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = REPLACEMENT.encode()
# Most bytes of a character in UTF-8, and so most byte tokens of a character.
_MAX_BYTES = 4
# If more tokens than this do not decode, they are invalid. They must not be held back without
# bound.
_MAX_PENDING_TOKENS = 2 * _MAX_BYTES
# The longest pattern of `clean_up_spaces` has four characters.
_CLEAN_UP_REACH = 3

_utf8_decode: Callable[[bytes, str, bool], tuple[str, int]] = codecs.utf_8_decode


class TextDecoder(Protocol):
    """Decodes one stream's ids as they arrive."""

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is final now."""
        ...

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; returns the text that is final now."""
        ...

    def finish(self) -> str:
        """Return the text still held back; an incomplete character is dropped."""
        ...


class PieceTable(dict[int, "str | bytes"]):
    """The piece of each id, computed on first use: `str`, or `bytes` of partial characters.

    The table is for decoders that translate each token separately and join the bytes.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], *, byte_by_byte: bool) -> None:
        """Use `piece_bytes` for ids that are not in the table yet.

        Args:
            piece_bytes: returns the bytes of an id; empty for unknown and for hidden ids.
            byte_by_byte: whether the tokenizer shows invalid bytes as one U+FFFD each, or as one
                for each broken sequence.
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
        """Return the bytes of several ids."""
        pieces = [self[token_id] for token_id in token_ids]
        return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])


class PieceDecoder:
    """Joins the pieces of a `PieceTable`: one look-up per token, for any length of text."""

    __slots__ = ("_borrowed", "_pending", "_strip", "_table")

    def __init__(self, table: PieceTable, prompt_tail: Sequence[int], strip_first: str) -> None:
        """Continue after `prompt_tail`.

        Args:
            table: pieces of the tokenizer.
            prompt_tail: the ids before the first; only an unfinished character at the end matters.
            strip_first: a character that the tokenizer drops at the start of the whole text.
        """
        self._table = table
        context = table.join(prompt_tail)
        self._pending = _incomplete_tail(context)
        # Bytes of the prompt count only if the output completes their character.
        self._borrowed = len(self._pending)
        self._strip = strip_first if not context else ""

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is final now."""
        piece = self._table[token_id]
        if isinstance(piece, str):
            if not self._pending and not self._strip:
                return piece
            piece = piece.encode()
        return self._join(piece)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; returns the text that is final now."""
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
            # The character is not dropped if it is U+FFFD itself, completed.
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
    # Python waits for the third byte of an encoded surrogate, although the second is invalid
    # already.
    return len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0


def _decode(data: bytes, byte_by_byte: bool) -> tuple[str, bytes]:
    """Return the text of `data`, and the bytes of an incomplete last character."""
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
    """Decodes the last tokens together with earlier ones and takes the new text; for any tokenizer.

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
        """Continue after `prompt_tail`.

        Args:
            decode: the tokenizer's decode, including special tokens.
            keeps: returns whether an id has text to show: it is known and not a hidden special
                token.
            prompt_tail: the ids before the first.
            splits_characters: whether tokens may hold part of a character, so that U+FFFD at the
                end means an unfinished character.
        """
        self._decode = decode
        self._keeps = keeps
        self._splits_characters = splits_characters
        # Hidden tokens are never added, because a window of only hidden tokens would give no
        # context.
        self._ids = [token_id for token_id in prompt_tail if keeps(token_id)]
        if splits_characters and REPLACEMENT in decode(self._ids):
            # Half a character at either end of the tail would corrupt the text after it.
            self._ids = []
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is final now."""
        return self.extend((token_id,))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; returns the text that is final now."""
        added = [token_id for token_id in token_ids if self._keeps(token_id)]
        if self._splits_characters:
            # Ids are added one by one: otherwise a long block with half a character at its end
            # would be held back.
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
        """Return the text held back, without the unfinished character."""
        if self._read == len(self._ids):
            return ""
        text = self._new_text().rstrip(REPLACEMENT)
        self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids)[len(shown) :]


class CleanedDecoder:
    """Applies `clean_up_spaces` to a decoder's text; holds back what later text may change."""

    __slots__ = ("_held", "_inner")

    def __init__(self, inner: TextDecoder) -> None:
        """Clean the text of `inner`."""
        self._inner = inner
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is final now."""
        return self._clean(self._inner.push(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add several ids; returns the text that is final now."""
        return self._clean(self._inner.extend(token_ids))

    def finish(self) -> str:
        """Return the text still held back."""
        text = clean_up_spaces(self._held + self._inner.finish())
        self._held = ""
        return text

    def _clean(self, text: str) -> str:
        text = self._held + text
        # Every pattern begins with a space and ends at most three characters later, and clean-up
        # only removes spaces. So no pattern crosses a border that follows three other characters.
        for border in range(len(text), _CLEAN_UP_REACH - 1, -1):
            if " " not in text[border - _CLEAN_UP_REACH : border]:
                self._held = text[border:]
                return clean_up_spaces(text[:border])
        self._held = text
        return ""
