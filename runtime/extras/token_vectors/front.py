"""Forms the vectors of a text's tokens. They have routes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.checkpoint.model_spec import Gives
from runtime.client.admission import EngineLimits
from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import HeadraceError
from runtime.requests.extra_spec import ExtraSpec

NAME = "token_vectors"
OF_ALL = ExtraSpec(NAME, prompt_start=0)


class TokenAnswer(ExtraAnswer):
    """The vectors of one text's tokens."""

    def __init__(self) -> None:
        """Start without vectors."""
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []

    def add(self, chunk: GenerationChunk, *, incremental: bool = False) -> None:  # noqa: ARG002
        """Add a chunk, which has vectors."""
        self._inputs += [block.data for block in chunk.blocks(NAME, is_input=True)]
        self._outputs += [block.data for block in chunk.blocks(NAME, is_input=False)]

    def data(self, size_bytes: int) -> bytes:
        """Return all vectors, concatenated as float32 bytes.

        Args:
            size_bytes: the expected total size.

        Raises:
            HeadraceError: vectors are missing, because they were not finite.
        """
        found = b"".join([*self._inputs, *self._outputs[-1:]])
        if len(found) != size_bytes:
            raise HeadraceError("The model gave no finite numbers for this text.")
        return found


class TokenVectorsFront(FrontExtra):
    """The extra output of late-interaction models, which has no field of `/generate`."""

    needs: ClassVar[Gives] = "vectors"
    field = "input"
    advice = "send fewer or shorter texts"

    def plan(self, body: Any, asked: Asked) -> Sequence[ExtraSpec | None] | None:  # noqa: ARG002
        """Return `None`, because no field of `/generate` requests this output."""
        return None

    def num_numbers(
        self,
        spec: ExtraSpec,  # noqa: ARG002
        num_prompt: int,
        num_output: int,  # noqa: ARG002
        limits: EngineLimits,
    ) -> int:
        """Return the number of values of all vectors, one vector for each token."""
        return limits.token_size * num_prompt

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> TokenAnswer:  # noqa: ARG002
        """Return an empty answer for one text."""
        return TokenAnswer()


EXTRA = TokenVectorsFront()
