"""The request of `/v1/completions`."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, cast

import msgspec

from openai_api.schemas.common import (
    GenerationFields,
    Rid,
    check_stream_options,
    refuse_unsupported,
)
from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import fields_of_type
from runtime.extras.logprobs.front import MAX_TOP_LOGPROBS
from runtime.requests.bounds import within
from runtime.requests.sampling_params import MAX_SAMPLES, NumSamples, NumTokens

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 2048


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of `/v1/completions`.

    Attributes:
        prompt: a text, texts, token ids, or lists of token ids.
        suffix: the text that follows; the model writes the text between prompt and suffix.
        best_of: number of samples for each prompt, of which the best `n` are returned.
        rid: one name for the request, or one for each prompt.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: NumTokens | None = None
    echo: bool | None = None
    logprobs: Annotated[int, within(0, MAX_TOP_LOGPROBS)] | bool | None = None
    suffix: str | None = None
    best_of: NumSamples | None = None
    rid: Rid | list[Rid] | None = None
    prompt_embeds: Any = None


DECODER = msgspec.json.Decoder(CompletionRequest)
# Fields of features that this server does not have.
_UNSUPPORTED = fields_of_type(CompletionRequest, Any)


def check_completion_request(request: CompletionRequest) -> None:
    """Refuse unsupported fields and combinations.

    Raises:
        InvalidRequest: the first error found.
    """
    refuse_unsupported(request, _UNSUPPORTED)
    check_stream_options(request)
    _check_best_of(request)
    if request.suffix and request.echo:
        raise InvalidRequest(
            "echo cannot be combined with suffix, because the text does not continue the prompt.",
            param="echo",
        )


def _check_best_of(request: CompletionRequest) -> None:
    best_of, n = request.best_of, request.n or 1
    if best_of is None:
        return
    if not n <= best_of <= MAX_SAMPLES:
        raise InvalidRequest(
            f"best_of must be in [n, {MAX_SAMPLES}], got {best_of} with n {n}.", param="best_of"
        )
    if best_of > n and request.stream:
        raise InvalidRequest(
            "best_of above n cannot be streamed: only the end shows the best.",
            param="best_of",
        )


def num_samples(request: CompletionRequest) -> int:
    """Return the number of samples that are generated for each prompt."""
    return max(request.best_of or 1, request.n or 1)


def _kinds(prompt: list[str | int | list[int]]) -> set[type]:
    # A prompt may have a million ids, and a Python loop over them would delay other requests.
    if prompt and type(prompt[0]) is int:
        with contextlib.suppress(TypeError):
            # A list that can be summed has only numbers; the sum takes a third of the time.
            sum(cast("list[int]", prompt))
            return {int}
    return set(map(type, prompt))


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts as a list of texts, or of lists of token ids.

    Raises:
        InvalidRequest: there are no prompts, too many, or mixed kinds.
    """
    prompt = request.prompt
    prompts: list[str | list[int]]
    kinds = {str} if isinstance(prompt, str) else _kinds(prompt)
    if isinstance(prompt, str) or kinds == {int}:
        prompts = [cast("str | list[int]", prompt)]
    elif len(kinds) <= 1:
        prompts = cast("list[str | list[int]]", prompt)
    else:
        raise InvalidRequest("prompt must not mix texts and token ids.", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt cannot be empty.", param="prompt")
    if len(prompts) > MAX_PROMPTS or len(prompts) * num_samples(request) > MAX_CHOICES:
        raise InvalidRequest(
            f"At most {MAX_PROMPTS} prompts and {MAX_CHOICES} choices per request are allowed.",
            param="prompt",
        )
    return prompts
