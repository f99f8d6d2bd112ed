"""`meta_info.hidden_states`: rows of numbers, as lists for Python or as JSON made bit by bit."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from typing import Any

import orjson

from runtime.client.front_extras import ExtraAnswer
from runtime.client.generation_stream import GenerationChunk

# Numbers turned into JSON between two turns of the event loop: about a millisecond.
_NUMBERS_PER_TURN = 16 * 1024
_BYTES = 4


class HiddenAnswer(ExtraAnswer):
    """One sample's hidden states, growing with its chunks.

    All of them are a list: a matrix of the prompt's rows first, then one row for each further
    output token, each row what the next token was made of. The last alone is one row.
    """

    def __init__(self, hidden_size: int, *, only_last: bool) -> None:
        """Start empty."""
        self._only_last = only_last
        self._row_bytes = hidden_size * _BYTES
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._num_tokens = 0

    def add(self, chunk: GenerationChunk, *, incremental: bool = False) -> None:  # noqa: ARG002
        """Take in a chunk; nothing is shown before the last."""
        self._num_tokens += len(chunk.token_ids)
        if not chunk.extras:
            return
        self._inputs += [block.data for block in chunk.blocks("hidden_states", is_input=True)]
        self._outputs += [block.data for block in chunk.blocks("hidden_states", is_input=False)]
        if self._only_last:
            del self._outputs[:-1]

    def _parts(self) -> tuple[list[bytes], list[bytes]]:
        """The rows of the prompt, and those of output tokens after the first."""
        outputs = self._rows(self._outputs)
        # After a stop string some may lie behind the last token of the answer.
        later = outputs[1 : max(self._num_tokens, 1)]
        return [*self._rows(self._inputs), *outputs[:1]], later

    def _rows(self, blocks: list[bytes]) -> list[bytes]:
        size = self._row_bytes
        return [
            block[begin : begin + size] for block in blocks for begin in range(0, len(block), size)
        ]

    def lists(self) -> list[Any]:
        """As nested lists of floats."""
        if self._only_last:
            return _floats(self._outputs[-1]) if self._outputs else []
        prompt, later = self._parts()
        return [[_floats(row) for row in prompt], *(_floats(row) for row in later)]

    def at_end(self) -> dict[str, Any]:
        """All of it as nested lists."""
        return {"hidden_states": self.lists()}

    async def at_end_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"hidden_states": await self.json()}

    async def json(self) -> orjson.Fragment:
        """As JSON, made in small portions so that other requests are served meanwhile."""
        if self._only_last:
            return orjson.Fragment(orjson.dumps(self.lists()))
        prompt, later = self._parts()
        pieces = [b"[["]
        budget = _NUMBERS_PER_TURN
        for piece, cost in self._pieces(prompt, later):
            pieces.append(piece)
            budget -= cost
            if budget <= 0:
                budget = _NUMBERS_PER_TURN
                await asyncio.sleep(0)
        return orjson.Fragment(b"".join(pieces))

    def _pieces(self, prompt: list[bytes], later: list[bytes]) -> Iterator[tuple[bytes, int]]:
        size = self._row_bytes // _BYTES
        for index, row in enumerate(prompt):
            yield (b"," if index else b"") + orjson.dumps(_floats(row)), size
        yield b"]", 0
        for row in later:
            yield b"," + orjson.dumps(_floats(row)), size
        yield b"]", 0


def _floats(row: bytes) -> list[float]:
    return array("f", row).tolist()
