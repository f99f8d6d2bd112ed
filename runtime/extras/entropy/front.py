"""The request field and the answer of entropies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.requests.extra_spec import ExtraSpec

NAME = "entropy"


class EntropyFields(Protocol):
    """The field that this extra adds to `/generate`."""

    return_entropy: bool | None


class EntropyMeta(TypedDict, total=False):
    """The key that this extra adds to `meta_info`: nats, for each output token."""

    output_token_entropy: list[float]


class EntropyFront(FrontExtra):
    """The entropy at each generated token, or, if none is generated, at the next token."""

    field = "return_entropy"
    advice = "leave it out"

    def plan(self, body: EntropyFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Return the spec for all samples, or None."""
        return [ExtraSpec(NAME)] * asked.num_prompts if body.return_entropy else None

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:  # noqa: ARG002
        """Return an empty answer."""
        return EntropyAnswer()


class EntropyAnswer(ExtraAnswer):
    """`output_token_entropy`, in nats."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: list[float] = []

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Add a chunk; `incremental` drops the output that was returned before."""
        if incremental:
            self._values.clear()
        blocks = chunk.blocks(NAME, is_input=False)
        found = [value for block in blocks for value in memoryview(block.data).cast("f")]
        # A stop string removes tokens; the entries after the last remaining one are removed here.
        self._values += found[: len(chunk.token_ids) or len(chunk.unsent_ids(NAME))]

    def meta_info(self) -> dict[str, Any]:
        """Return the key for `meta_info`, with a new list."""
        return {"output_token_entropy": [*self._values]}


EXTRA = EntropyFront()
