"""Entropies as they are asked for and answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.requests.extra_spec import ExtraSpec

NAME = "entropy"


class EntropyFields(Protocol):
    """Its field of `/generate`."""

    return_entropy: bool | None


class EntropyMeta(TypedDict, total=False):
    """Its key of `meta_info`: nats, of each output token."""

    output_token_entropy: list[float]


class EntropyFront(FrontExtra):
    """Of each generated token; or of the one that would come next, where none is made."""

    field = "return_entropy"
    advice = "leave it out"

    def plan(self, body: EntropyFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Of all samples or of none."""
        return [ExtraSpec(NAME)] * asked.num_prompts if body.return_entropy else None

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:  # noqa: ARG002
        """An empty answer."""
        return EntropyAnswer()


class EntropyAnswer(ExtraAnswer):
    """`output_token_entropy`, in nats."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: list[float] = []

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Take in a chunk; `incremental` forgets the output that was shown before."""
        if incremental:
            self._values.clear()
        blocks = chunk.blocks(NAME, is_input=False)
        found = [value for block in blocks for value in memoryview(block.data).cast("f")]
        # A stop string cuts tokens off; what stands behind the last one is cut here.
        self._values += found[: len(chunk.token_ids) or len(chunk.unsent_ids(NAME))]

    def meta_info(self) -> dict[str, Any]:
        """The key that goes into `meta_info`, in a list of its own."""
        return {"output_token_entropy": [*self._values]}


EXTRA = EntropyFront()
