"""Computes a vector for each token of a text, for late-interaction retrieval (ColBERT).

The vectors stay packed as bytes until they are sent.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from runtime.client.front_extras import check_kind
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import InvalidRequest
from runtime.eventloop.json_pieces import BATCH, Pieces
from runtime.extras.token_vectors.front import OF_ALL, TokenAnswer
from runtime.requests.sampling_params import check_priority
from runtime.service.context import ServiceContext
from runtime.service.text_embeddings import TextInput, TextOptions, open_texts, read_texts

_BYTES = 4
# Bytes that are encoded at a time. The number is divisible by three, so base64 needs no padding
# inside.
_BASE64_BYTES = 3 * 2**12


@dataclass(frozen=True)
class TokenVectors:
    """The token vectors of one text.

    Attributes:
        data: `[prompt_tokens, size]` float32, each row of unit length.
        size: length of a token's vector.
        prompt_tokens: number of the text's tokens.
    """

    data: bytes
    size: int
    prompt_tokens: int

    def lists(self) -> list[list[float]]:
        """Return `[prompt_tokens][size]` as Python lists."""
        return list(map(array.tolist, self._rows()))

    def _rows(self) -> Iterator[array[float]]:
        width = self.size * _BYTES
        for begin in range(0, len(self.data), width):
            yield array("f", self.data[begin : begin + width])


class TokenVectorsJson(Pieces):
    """JSON of one text's vectors: lists of numbers, or base64 of the bytes of all rows in order."""

    def __init__(self, found: TokenVectors, encoding_format: str) -> None:
        """Prepare `found`; it is encoded piece by piece while it is sent."""
        self.cost = len(found.data) // _BYTES
        self._found = found
        self._as_base64 = encoding_format == "base64"

    def pieces(self) -> Iterator[bytes]:
        """Return an iterator over the pieces of the JSON."""
        return self._base64() if self._as_base64 else self._lists()

    def _base64(self) -> Iterator[bytes]:
        numbers = self._found.data
        if sys.byteorder == "big":
            swapped = array("f", numbers)
            swapped.byteswap()
            numbers = swapped.tobytes()
        yield b'"'
        for begin in range(0, len(numbers), _BASE64_BYTES):
            yield base64.b64encode(numbers[begin : begin + _BASE64_BYTES])
        yield b'"'

    def _lists(self) -> Iterator[bytes]:
        comma = b"["
        width = self._found.size
        numbers = memoryview(self._found.data).cast("f")
        for begin in range(0, len(numbers), width):
            row = numbers[begin : begin + width]
            opening = b"["
            # A row is encoded in batches, because a vector may have a hundred thousand numbers.
            for first in range(0, width, BATCH):
                yield comma + opening + orjson.dumps(row[first : first + BATCH].tolist())[1:-1]
                comma, opening = b",", b""
            yield b"]"
        yield b"]"


async def embed_tokens(
    context: ServiceContext, given: Sequence[TextInput], options: TextOptions
) -> list[TokenVectors]:
    """Return the vectors of all tokens of all texts; one failure fails them all.

    Args:
        context: the service.
        given: texts or lists of token ids.
        options: the request's options.

    Raises:
        InvalidRequest: there are too many inputs, an input is too long, the answer would be too
            large, or the model does not give vectors.
        EmbeddingAborted: a text was aborted.
    """
    model = context.model
    check_priority(options.priority)
    check_kind([OF_ALL], context.client.limits)
    if model.gives != "vectors":
        raise InvalidRequest(
            "Vectors of tokens need a model that gives vectors; this one scores texts."
        )
    if options.dimensions not in (None, model.token_size):
        raise InvalidRequest(
            f"dimensions must be {model.token_size} for vectors of tokens: they are not shortened.",
            param="dimensions",
        )
    generation = await open_texts(context, given, options, OF_ALL)

    def made_of(_: str, answer: TokenAnswer, end: GenerationChunk) -> TokenVectors:
        data = answer.data(end.prompt_tokens * model.token_size * _BYTES)
        return TokenVectors(data, model.token_size, end.prompt_tokens)

    return await read_texts(generation, TokenAnswer, made_of)
