"""Counts the tokens of thoughts in an output, for models whose thoughts only the text shows."""

from __future__ import annotations

from collections import deque

from runtime.client.generation_stream import GenerationChunk
from runtime.text.decoders import TextDecoder
from runtime.text.thoughts import ThoughtScan


class ThoughtCount:
    """Counts the tokens that begin in thoughts, including the tokens that end the thoughts.

    Text may come later than its tokens. A token is counted once its text shows whether it is a
    thought.
    """

    def __init__(self, scan: ThoughtScan, decoder: TextDecoder) -> None:
        """Start with no output; `decoder` gives each token's part of the text."""
        self._scan = scan
        self._decoder = decoder
        self._waiting: deque[int] = deque()
        # The position in the text of the first waiting token, and the position up to which text was
        # read.
        self._begin = 0
        self._num_read = 0

    def add(self, chunk: GenerationChunk) -> int:
        """Take a chunk; return how many more tokens are now known to be thoughts."""
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
                # The text after this point has no thoughts.
                self._waiting.clear()
            while self._waiting and self._begin < self._num_read:
                count += part.kind == "thought"
                self._begin += len(self._decoder.push(self._waiting.popleft()))
        return count
