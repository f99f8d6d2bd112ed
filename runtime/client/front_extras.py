"""The front half of an extra: reads its request fields, bounds its size, formats its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import msgspec

from runtime.checkpoint.model_spec import Gives
from runtime.client.admission import EngineLimits
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import InvalidRequest
from runtime.requests.extra_spec import EXTRAS, ExtraSpec, load_half

_OTHER_KIND: dict[Gives, str] = {
    "tokens": "This server's model generates text; that needs a model that gives vectors.",
    "vectors": (
        "This server's model gives vectors of texts and cannot generate text: use /encode or "
        "/v1/embeddings."
    ),
    "scores": (
        "This server's model scores texts and cannot generate text: use /classify, /v1/classify or "
        "/v1/rerank."
    ),
}


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The parts of a native request that an extra reads besides its own fields.

    Attributes:
        num_prompts: prompts of the request.
        vocab_size: the logits' width.
        n: samples of each prompt.
        has_tokens: whether the prompts have tokens, not embeddings.
        offered: extras that a server option has enabled, among those that need an option.
    """

    num_prompts: int
    vocab_size: int
    n: int = 1
    has_tokens: bool = True
    offered: frozenset[str] = frozenset()


class AnsweredSample(msgspec.Struct, frozen=True, gc=False):
    """The facts about a sample that an extra's answer may need.

    Attributes:
        prompt_ids: the prompt's token ids, as admitted.
        hidden_size: the model's hidden size.
        token_text: returns a token's text.
        as_json: whether the answer will be encoded as JSON; else its lists are Python lists.
        is_shown_again: whether a later answer may repeat this one.
    """

    prompt_ids: list[int]
    hidden_size: int
    token_text: Callable[[int], str]
    as_json: bool = False
    is_shown_again: bool = True


class ExtraAnswer:
    """One sample's answer in the native API's format; it grows with the sample's chunks.

    In an answer that becomes JSON, a list that may be large is a `Pieces`.
    """

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Add a chunk. With `incremental`, drop the output that was shown before."""
        raise NotImplementedError

    def meta_info(self) -> dict[str, Any]:
        """Return keys for every answer's `meta_info`; its lists are new objects."""
        return {}

    def at_end(self) -> dict[str, Any]:
        """Return additional keys for the last answer's `meta_info`."""
        return {}


class FrontExtra:
    """`EXTRA` of an extra's `front` module, which must not import torch or numpy.

    Attributes:
        needs: kind of output that the model must have for this extra.
        field: name in the native API of the field that a refusal names.
        advice: what to do about an answer that would be too large.
    """

    needs: ClassVar[Gives] = "tokens"
    field: str
    advice: str

    def plan(self, body: Any, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Read what each prompt's samples request from the extra's fields of a `/generate` body.

        Returns:
            One entry for each prompt, or `None` when no prompt requests the extra.

        Raises:
            InvalidRequest: a value out of range, or a list of the wrong length.
        """
        raise NotImplementedError

    def check(self, spec: ExtraSpec, num_prompt: int) -> None:
        """Make the checks that need the prompt's length.

        Raises:
            InvalidRequest: a position outside the prompt.
        """

    def num_numbers(
        self,
        spec: ExtraSpec,  # noqa: ARG002
        num_prompt: int,  # noqa: ARG002
        num_output: int,  # noqa: ARG002
        limits: EngineLimits,  # noqa: ARG002
    ) -> int:
        """Return how many four-byte numbers the answer may have, besides one per output token."""
        return 0

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:
        """Return an empty answer."""
        raise NotImplementedError


@cache
def front_extras() -> list[FrontExtra]:
    """Return every extra's front half, in the order of the table."""
    return [front_extra(name) for name in EXTRAS]


@cache
def front_extra(name: str) -> FrontExtra:
    """Return one extra's front half."""
    return cast("FrontExtra", load_half(name, "front"))


def check_extras(extras: Sequence[ExtraSpec], num_prompt: int) -> None:
    """Check all extras of an admitted request; see `FrontExtra.check`."""
    for spec in extras:
        front_extra(spec.name).check(spec, num_prompt)


def check_kind(extras: Sequence[ExtraSpec], limits: EngineLimits) -> None:
    """Refuse extras that the model does not give.

    Raises:
        InvalidRequest: the request is for another kind of model.
    """
    wanted = {front_extra(spec.name).needs for spec in extras} or {"tokens"}
    # Scores are requested in the same way as vectors are.
    if wanted != {"tokens" if limits.gives == "tokens" else "vectors"}:
        raise InvalidRequest(_OTHER_KIND[limits.gives])


def answers_of(extras: Sequence[ExtraSpec], sample: AnsweredSample) -> list[ExtraAnswer]:
    """Return an empty answer for each extra of a sample."""
    return [front_extra(spec.name).answer(spec, sample) for spec in extras]
