"""The front process's half of an extra (an output besides tokens, such as log-probabilities).

It reads the extra's request fields, bounds the size of its answer, and formats the answer.
"""

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
        vocab_size: number of logits of a token.
        n: samples of each prompt.
        has_tokens: whether the prompts are tokens; else they are embeddings.
        offered: names of the extras that a server option has enabled. Extras that need no option
            are not listed.
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
        token_text: returns the text of a token id.
        as_json: whether the answer will be encoded as JSON; else its lists are Python lists.
        is_shown_again: whether a later answer may repeat this one.
    """

    prompt_ids: list[int]
    hidden_size: int
    token_text: Callable[[int], str]
    as_json: bool = False
    is_shown_again: bool = True


class ExtraAnswer:
    """An extra's part of one sample's answer, in the native API's format.

    It grows with the sample's chunks. If the answer becomes JSON, a list that may be large is a
    `Pieces`, which is encoded while it is sent.
    """

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Add a chunk. With `incremental`, first drop what an earlier answer has shown."""
        raise NotImplementedError

    def meta_info(self) -> dict[str, Any]:
        """Return the extra's keys of `meta_info`, for every answer; the lists are new objects."""
        return {}

    def at_end(self) -> dict[str, Any]:
        """Return the keys that only the last answer's `meta_info` has."""
        return {}


class FrontExtra:
    """Base of the object `EXTRA` in each extra's `front` module, which imports no torch or numpy.

    Attributes:
        needs: kind of output that the model must have for this extra.
        field: the native API's field that an error message names.
        advice: for the error message: how to make an answer smaller that would be too large.
    """

    needs: ClassVar[Gives] = "tokens"
    field: str
    advice: str

    def plan(self, body: Any, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Read the extra's fields of a `/generate` body.

        Args:
            body: the decoded body.
            asked: the other parts of the request that matter.

        Returns:
            What the samples of each prompt request, one entry for each prompt. `None` if no prompt
            requests the extra.

        Raises:
            InvalidRequest: a value is out of range, or a list has the wrong length.
        """
        raise NotImplementedError

    def check(self, spec: ExtraSpec, num_prompt: int) -> None:
        """Make the checks that need the length of the prompt.

        Args:
            spec: what a sample requests.
            num_prompt: number of the prompt's tokens.

        Raises:
            InvalidRequest: a requested position is outside the prompt.
        """

    def num_numbers(
        self,
        spec: ExtraSpec,  # noqa: ARG002
        num_prompt: int,  # noqa: ARG002
        num_output: int,  # noqa: ARG002
        limits: EngineLimits,  # noqa: ARG002
    ) -> int:
        """Return how many four-byte numbers this extra may add to a sample's answer."""
        return 0

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> ExtraAnswer:
        """Return this extra's answer for a sample; it has no data until `add` is called."""
        raise NotImplementedError


@cache
def front_extras() -> list[FrontExtra]:
    """Return the front half of every extra, in the order of `EXTRAS`."""
    return [front_extra(name) for name in EXTRAS]


@cache
def front_extra(name: str) -> FrontExtra:
    """Return the front half of the extra `name`."""
    return cast("FrontExtra", load_half(name, "front"))


def check_extras(extras: Sequence[ExtraSpec], num_prompt: int) -> None:
    """Call `FrontExtra.check` for each extra of an admitted request."""
    for spec in extras:
        front_extra(spec.name).check(spec, num_prompt)


def check_kind(extras: Sequence[ExtraSpec], limits: EngineLimits) -> None:
    """Refuse a request for outputs that the model's kind does not give.

    Args:
        extras: the requested extras; none of them means that the request is for tokens.
        limits: the engine's bounds, which include the model's kind.

    Raises:
        InvalidRequest: the request is for another kind of model.
    """
    wanted = {front_extra(spec.name).needs for spec in extras} or {"tokens"}
    # A model that gives scores uses the same extra as one that gives vectors.
    if wanted != {"tokens" if limits.gives == "tokens" else "vectors"}:
        raise InvalidRequest(_OTHER_KIND[limits.gives])


def answers_of(extras: Sequence[ExtraSpec], sample: AnsweredSample) -> list[ExtraAnswer]:
    """Return one answer for each extra of a sample; it has no data until `add` is called."""
    return [front_extra(spec.name).answer(spec, sample) for spec in extras]
