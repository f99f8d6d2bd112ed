"""Reads the request field for entropies, and forms their answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.requests.extra_spec import ExtraSpec

NAME = "entropy"


class EntropyFields(Protocol):
    """The field of `/generate` that requests entropies."""

    return_entropy: bool | None


class EntropyMeta(TypedDict, total=False):
    """The key of `meta_info` with the entropies, in nats, one for each output token."""

    output_token_entropy: list[float]


class EntropyFront(FrontExtra):
    """Returns the entropy at each generated token; if none is generated, at the next token."""

    field = "return_entropy"
    advice = "leave it out"

    def plan(self, body: EntropyFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Return the spec for each prompt; `None` if the request wants no entropies."""
        return [ExtraSpec(NAME)] * asked.num_prompts if body.return_entropy else None

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:  # noqa: ARG002
        """Return an empty answer for one sample."""
        return EntropyAnswer()


class EntropyAnswer(ExtraAnswer):
    """The answer of one sample, `output_token_entropy`, in nats."""

    def __init__(self) -> None:
        """Start without entropies."""
        self._values: list[float] = []

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Add a chunk of output; with `incremental`, earlier values are removed first."""
        if incremental:
            self._values.clear()
        blocks = chunk.blocks(NAME, is_input=False)
        found = [value for block in blocks for value in memoryview(block.data).cast("f")]
        # A stop string may have removed tokens from the chunk; their entropies are removed too.
        self._values += found[: len(chunk.token_ids) or len(chunk.unsent_ids(NAME))]

    def meta_info(self) -> dict[str, Any]:
        """Return the key for `meta_info`, with a new list."""
        return {"output_token_entropy": [*self._values]}


EXTRA = EntropyFront()
