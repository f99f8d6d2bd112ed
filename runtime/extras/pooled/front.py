"""Reads the vector or the scores that an embedding or scoring model computed for a text.

Routes such as `/v1/embeddings` return them; `/generate` does not.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.checkpoint.model_spec import Gives
from runtime.client.admission import EngineLimits
from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import HeadraceError
from runtime.extras.pooled.parts import NAME
from runtime.requests.extra_spec import ExtraSpec


class VectorAnswer(ExtraAnswer):
    """The vector or the scores of one text."""

    def __init__(self) -> None:
        """Begin without values; `add` stores them."""
        self._data = b""

    def add(self, chunk: GenerationChunk, *, incremental: bool = False) -> None:  # noqa: ARG002
        """Add a chunk, which has the values."""
        for block in chunk.blocks(NAME, is_input=False):
            self._data = block.data

    def numbers(self) -> array[float]:
        """Return the vector or the scores as float32.

        Raises:
            HeadraceError: the model returned no numbers, or some numbers are not finite.
        """
        found = array("f", self._data)
        if not found or not all(map(math.isfinite, found)):
            raise HeadraceError("The model gave no finite numbers for this text.")
        return found


class VectorFront(FrontExtra):
    """The extra output of embedding and scoring models, which has no field of `/generate`."""

    needs: ClassVar[Gives] = "vectors"
    field = "input"
    advice = "send fewer texts"

    def plan(self, body: Any, asked: Asked) -> Sequence[ExtraSpec | None] | None:  # noqa: ARG002
        """Return `None`, because no field of `/generate` requests this output."""
        return None

    def num_numbers(
        self,
        spec: ExtraSpec,  # noqa: ARG002
        num_prompt: int,  # noqa: ARG002
        num_output: int,  # noqa: ARG002
        limits: EngineLimits,
    ) -> int:
        """Return the length of a vector."""
        return limits.hidden_size

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> VectorAnswer:  # noqa: ARG002
        """Return an answer without values; `VectorAnswer.add` fills it when the values arrive."""
        return VectorAnswer()


EXTRA = VectorFront()
