"""Reads the request fields about chosen experts, and forms their answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from runtime.client.admission import EngineLimits
from runtime.client.front_extras import AnsweredSample, Asked, ExtraAnswer, FrontExtra
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import InvalidRequest
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.sampling_params import INT64_MAX

NAME = "routed_experts"
_HEAD = 4


class RoutedFields(Protocol):
    """The fields of `/generate` that request chosen experts; the second needs the first."""

    return_routed_experts: bool | None
    routed_experts_start_len: int | None


class RoutedMeta(TypedDict, total=False):
    """The key of `meta_info` with the chosen experts.

    The value is int32 expert ids in base64, shaped `[positions, layers with experts, chosen
    experts]`.
    """

    routed_experts: str


class RoutedExpertsFront(FrontExtra):
    """Returns the experts of every token except the last one, which no step has processed."""

    field = "return_routed_experts"
    advice = "give routed_experts_start_len"

    def plan(self, body: RoutedFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Return the spec for each prompt; `None` if the request does not want the experts.

        Raises:
            InvalidRequest: the server was started without this extra output, or the start is
                negative.
        """
        start = body.routed_experts_start_len or 0
        if not 0 <= start <= INT64_MAX:
            raise InvalidRequest(
                f"routed_experts_start_len must be 0 to {INT64_MAX}, got {start}.",
                param="routed_experts_start_len",
            )
        if not body.return_routed_experts:
            return None
        if NAME not in asked.offered:
            raise InvalidRequest(
                "return_routed_experts needs a mixture-of-experts model and a server that was "
                "started with --enable-return-routed-experts.",
                param=self.field,
            )
        return [ExtraSpec(NAME, prompt_start=start)] * asked.num_prompts

    def check(self, spec: ExtraSpec, num_prompt: int) -> None:
        """Check the spec against the length of the prompt.

        Raises:
            InvalidRequest: `routed_experts_start_len` is larger than the prompt.
        """
        if spec.prompt_start > num_prompt:
            raise InvalidRequest(
                f"routed_experts_start_len ({spec.prompt_start}) is larger than the prompt "
                f"({num_prompt} tokens).",
                param="routed_experts_start_len",
            )

    def num_numbers(
        self, spec: ExtraSpec, num_prompt: int, num_output: int, limits: EngineLimits
    ) -> int:
        """Return how many numbers an answer has at most: one for each chosen expert of a token."""
        return (num_prompt - spec.prompt_start + num_output) * limits.experts_per_token

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:
        """Return an empty answer for one sample."""
        # The first output token is sampled at the prompt's last position. Its entry is omitted if
        # the start is after this position.
        return RoutedExpertsAnswer(1 if spec.prompt_start >= len(sample.prompt_ids) else 0)


class RoutedExpertsAnswer(ExtraAnswer):
    """The answer of one sample, `routed_experts`, which is returned when the sample has ended."""

    def __init__(self, num_left_out: int) -> None:
        """Start without values; the first `num_left_out` output positions are omitted."""
        self._num_left_out = num_left_out
        self._found: dict[bool, list[bytes]] = {True: [], False: []}
        self._num_tokens = 0
        self._size = 0

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:  # noqa: ARG002
        """Add a chunk of output. The values are returned with the last chunk only."""
        self._num_tokens += len(chunk.token_ids)
        for is_input, found in self._found.items():
            for block in chunk.blocks(NAME, is_input=is_input):
                self._size = int.from_bytes(block.data[:_HEAD], "little")
                found.append(block.data[_HEAD:])

    def at_end(self) -> dict[str, Any]:
        """Return the key for the last `meta_info`."""
        outputs = b"".join(self._found[False])
        # A stop string may have removed tokens; their entries are omitted.
        most = max(self._num_tokens, 1) * self._size
        outputs = outputs[self._num_left_out * self._size : most]
        data = b"".join(self._found[True]) + outputs
        return {"routed_experts": base64.b64encode(data).decode()}


EXTRA = RoutedExpertsFront()
