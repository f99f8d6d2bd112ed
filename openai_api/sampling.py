"""Converts OpenAI's sampling names to the engine's; errors use the names that the client sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec

from openai_api.constraints import requested_constraint
from openai_api.schemas.common import GenerationFields
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import (
    SamplingFields,
    SamplingParams,
    resolve_sampling,
)

# The keys of `generation_config.json` that set defaults. Its other keys are ignored here.
MODEL_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_SAME_NAMES = (
    "temperature",
    "min_p",
    "n",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
)
_same = attrgetter(*_SAME_NAMES)


def model_sampling_defaults(generation_defaults: Mapping[str, float | int]) -> dict[str, object]:
    """Return the model's own sampling defaults; keys that it does not set are absent."""
    return {
        key: generation_defaults[key] for key in MODEL_DEFAULT_KEYS if key in generation_defaults
    }


def sampling_of(
    request: GenerationFields,
    max_tokens: int | None,
    defaults: Mapping[str, object],
    vocab_size: int,
) -> SamplingParams:
    """Check and convert the sampling parameters of a body.

    Args:
        request: the body.
        max_tokens: the request's limit, or `None` for as many as fit.
        defaults: values by native name, for keys that the request omits.
        vocab_size: width of the logits.

    Raises:
        InvalidRequest: a value out of bounds.
    """
    for name in ("logit_bias", "stop_token_ids"):
        # The entries are counted before they are read, because streams share this thread.
        if len(getattr(request, name) or ()) > vocab_size:
            raise InvalidRequest(f"{name} has more entries than there are tokens.", param=name)
    # SGLang's own API refuses 0, but for clients of all other servers 0 means "off".
    top_k = -1 if request.top_k == 0 else request.top_k
    top_p = request.top_p
    if top_p == 0:
        # OpenAI takes 0, which keeps the most likely token alone.
        top_k, top_p = 1, 1.0
    constraint = requested_constraint(request)
    asked: dict[str, Any] = {} if constraint is None else {constraint.kind: constraint.text}
    fields = SamplingFields(
        **dict(zip(_SAME_NAMES, _same(request), strict=True)),
        **asked,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=msgspec.UNSET if max_tokens is None else max_tokens,
        min_new_tokens=request.min_tokens,
        sampling_seed=request.seed,
    )
    return resolve_sampling(fields, {"max_new_tokens": None, **defaults}, vocab_size)


class WireNames:
    """Renames the engine's fields to OpenAI's in the errors of a block."""

    def __init__(self, max_tokens: str, top: str, others: Mapping[str, str] | None = None) -> None:
        """Store the endpoint's names of two fields; other fields have one name at all endpoints.

        Args:
            max_tokens: the endpoint's name for the output limit.
            top: the endpoint's name for the number of log-probabilities per token.
            others: further names of a wire that is not OpenAI's, by the name to replace.
        """
        self._others = others or {}
        self._max_tokens = max_tokens
        self._top = top

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise an `InvalidRequest` of the block again, renamed."""
        if not isinstance(error, InvalidRequest):
            return
        names = {
            "max_new_tokens": self._max_tokens,
            "top_logprobs_num": self._top,
            "min_new_tokens": "min_tokens",
            "sampling_seed": "seed",
            "input_ids": "prompt",
            **self._others,
        }
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), error.message)
        param = names.get(error.param, error.param) if error.param else None
        raise type(error)(message, param=param) from None
