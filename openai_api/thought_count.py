"""Counts the tokens of thoughts in an output, for models whose thoughts are marked by text only."""

from __future__ import annotations

from collections import deque

from runtime.client.generation_stream import GenerationChunk
from runtime.text.decoders import TextDecoder
from runtime.text.thoughts import ThoughtScan


class ThoughtCount:
    """Counts the tokens that begin inside thoughts, including the tokens that end the thoughts.

    The text of a token may arrive later than the token. A token is counted once its text shows
    whether it belongs to a thought.
    """

    def __init__(self, scan: ThoughtScan, decoder: TextDecoder) -> None:
        """Begin without output.

        Args:
            scan: finds thoughts in the text.
            decoder: returns each token's part of the text.
        """
        self._scan = scan
        self._decoder = decoder
        self._waiting: deque[int] = deque()
        # Position in the text where the first waiting token begins, and position up to which the
        # text was scanned.
        self._begin = 0
        self._num_read = 0

    def add(self, chunk: GenerationChunk) -> int:
        """Add a chunk; return how many further tokens are now known to be thoughts."""
        if self._scan.is_over and not self._waiting:
            return 0
        self._waiting += chunk.token_ids
        parts = self._scan.feed(chunk.text)
        if chunk.finish_reason is not None:
            parts += self._scan.finish()
        count = 0
        for part in parts:
            self._num_read += len(part.text)
            if part.is_answer and self._scan.is_over:
                # The rest of the output has no thoughts.
                self._waiting.clear()
            while self._waiting and self._begin < self._num_read:
                count += part.kind == "thought"
                self._begin += len(self._decoder.push(self._waiting.popleft()))
        return count
