"""Text and bytes of single tokens, for log-probabilities that are reported with text."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.decoder_choice import DecoderFactory
from runtime.text.decoders import TextDecoder
from runtime.text.tokenizer import Tokenizer


class TokenPieces:
    """Text and bytes of tokens, by id. The decoder is made on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare to read `tokenizer` on first use."""
        self._tokenizer = tokenizer
        self._decoders: DecoderFactory | None = None

    def decoder(self, *, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> TextDecoder:
        """Return a decoder that gives an output's text token by token, like the detokenizer."""
        return self._made().create(skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that outputs may hide it."""
        return token_id in self._tokenizer.special_ids

    def data(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be a part of a character; empty for an unknown id."""
        return self._made().token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Return a token as text, with U+FFFD for a part of a character."""
        return self.data(token_id).decode(errors="replace")

    def spelled(self, token_id: int) -> str:
        r"""Return a token in OpenAI's notation: a part of a character is `bytes:\xe2\x80`."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{data.decode(errors='backslashreplace')}"

    def _made(self) -> DecoderFactory:
        if self._decoders is None:
            self._decoders = DecoderFactory(self._tokenizer)
        return self._decoders
