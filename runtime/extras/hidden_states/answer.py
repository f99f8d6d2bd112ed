"""Forms `meta_info.hidden_states`: rows of numbers, as Python lists or as JSON."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, TypedDict

import orjson

from runtime.client.front_extras import ExtraAnswer
from runtime.client.generation_stream import GenerationChunk
from runtime.eventloop.json_pieces import Pieces

_BYTES = 4


class HiddenMeta(TypedDict, total=False):
    """The key of `meta_info` with the hidden states.

    The value is one row of numbers, or a list: a matrix for the prompt, then one row per token.
    """

    hidden_states: list[Any]


class HiddenAnswer(ExtraAnswer, Pieces):
    """The hidden states of one sample, collected from its chunks of output.

    For all tokens, the value is a list: first a matrix of the prompt's rows, then one row for each
    further output token. Each row is the hidden state from which the next token was computed. For
    the last token only, the value is one row.
    """

    def __init__(self, hidden_size: int, *, only_last: bool, as_json: bool = True) -> None:
        """Start without hidden states.

        Args:
            hidden_size: length of a row.
            only_last: whether only the last token's hidden state is wanted.
            as_json: whether the answer is JSON; otherwise Python lists.
        """
        self._as_json = as_json
        self._only_last = only_last
        self._row_bytes = hidden_size * _BYTES
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._num_tokens = 0

    def add(self, chunk: GenerationChunk, *, incremental: bool = False) -> None:  # noqa: ARG002
        """Add a chunk of output. The values are returned with the last chunk only."""
        self._num_tokens += len(chunk.token_ids)
        if not chunk.extras:
            return
        self._inputs += [block.data for block in chunk.blocks("hidden_states", is_input=True)]
        self._outputs += [block.data for block in chunk.blocks("hidden_states", is_input=False)]
        if self._only_last:
            del self._outputs[:-1]

    def _parts(self) -> tuple[list[bytes], list[bytes]]:
        """Return the rows of the prompt, and the rows of output tokens after the first one."""
        outputs = self._rows(self._outputs)
        # A stop string may have removed tokens; their rows are omitted.
        later = outputs[1 : max(self._num_tokens, 1)]
        return [*self._rows(self._inputs), *outputs[:1]], later

    def _rows(self, blocks: list[bytes]) -> list[bytes]:
        size = self._row_bytes
        return [
            block[begin : begin + size] for block in blocks for begin in range(0, len(block), size)
        ]

    def lists(self) -> list[Any]:
        """Return the rows as nested lists of floats."""
        if self._only_last:
            return _floats(self._outputs[-1]) if self._outputs else []
        prompt, later = self._parts()
        return [[_floats(row) for row in prompt], *(_floats(row) for row in later)]

    def at_end(self) -> dict[str, Any]:
        """Return the key for the last `meta_info`, as nested lists or as pieces of JSON."""
        return {"hidden_states": self if self._as_json else self.lists()}

    @property
    def cost(self) -> int:  # type: ignore[override]  # worked out when it is asked for
        """Number of values, by which the JSON encoder divides its work; see `Pieces`."""
        return sum(map(len, self._inputs)) // _BYTES + sum(map(len, self._outputs)) // _BYTES

    def pieces(self) -> Iterator[bytes]:
        """Yield the answer as pieces of JSON; see `Pieces`."""
        if self._only_last:
            yield orjson.dumps(self.lists())
            return
        prompt, later = self._parts()
        yield b"[["
        for index, row in enumerate(prompt):
            yield (b"," if index else b"") + orjson.dumps(_floats(row))
        yield b"]"
        for row in later:
            yield b"," + orjson.dumps(_floats(row))
        yield b"]"


def _floats(row: bytes) -> list[float]:
    return array("f", row).tolist()
