"""Functions that read an engine's stream as one text, or as pieces of new text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

Sampling = Mapping[str, Any] | None


class _Merger:
    """Finds the new text in each chunk of one stream.

    Our engine reports the new text of a chunk as `text_delta`; other engines do not. If the second
    text of such a stream begins with the first text, each text is taken to contain all earlier
    text.
    """

    def __init__(self) -> None:
        self.text = ""
        self._is_cumulative: bool | None = None

    def new_part(self, chunk: Mapping[str, Any]) -> str:
        """Return the text that `chunk` adds to the stream.

        Raises:
            ValueError: `chunk` is the error event of a server's stream.
        """
        if "error" in chunk:
            error = chunk["error"]
            raise ValueError(error["message"] if isinstance(error, Mapping) else str(error))
        text = chunk["text"]
        delta = chunk.get("text_delta")
        if delta is None:
            delta = self._guess(text)
        self.text += delta
        return str(delta)

    def _guess(self, text: str) -> str:
        if self._is_cumulative is None and self.text:
            self._is_cumulative = text.startswith(self.text)
        return text[len(self.text) :] if self._is_cumulative else text


def stream_and_merge(llm: Any, prompt: str, sampling_params: Sampling = None) -> str:
    """Stream the answer to `prompt` from an engine, and return its whole text."""
    merger = _Merger()
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        merger.new_part(chunk)
    return merger.text


async def async_stream_and_merge(
    llm: Any, prompt: str, sampling_params: Sampling = None
) -> AsyncGenerator[str, None]:
    """Yield the new text of each chunk of the answer to `prompt`; use it with `async for`."""
    merger = _Merger()
    chunks = await llm.async_generate(prompt, sampling_params, stream=True)
    try:
        async for chunk in chunks:
            part = merger.new_part(chunk)
            if part:
                yield part
    finally:
        # If this generator is closed early, the request must end now, not at garbage collection.
        await chunks.aclose()


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """Return `new_chunk` without its longest prefix that `existing_text` ends with.

    The result is wrong if chunks are deltas and repeat ("ha", "ha"). The function exists for
    programs that import it from SGLang.
    """
    most = min(len(existing_text), len(new_chunk))
    for size in range(most, 0, -1):
        if existing_text.endswith(new_chunk[:size]):
            return new_chunk[size:]
    return new_chunk
