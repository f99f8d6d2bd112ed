"""Converts OpenAI's sampling fields to the engine's parameters, and field names in errors back."""

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

# Keys of `generation_config.json` that set sampling defaults; its other keys are ignored.
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
    """Return the sampling defaults that the model's files set."""
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
        max_tokens: the request's limit of output tokens; `None` for as many as fit.
        defaults: values by native name, for keys that the request omits.
        vocab_size: number of logits of a token; token ids must be smaller.

    Raises:
        InvalidRequest: a value is out of bounds.
    """
    for name in ("logit_bias", "stop_token_ids"):
        # Lists that are too long are refused before they are read, because reading them would delay
        # other requests on this event loop.
        if len(getattr(request, name) or ()) > vocab_size:
            raise InvalidRequest(f"{name} has more entries than there are tokens.", param=name)
    # 0 means off, as in the OpenAI routes of all servers. (SGLang's native API refuses 0.)
    top_k = -1 if request.top_k == 0 else request.top_k
    top_p = request.top_p
    if top_p == 0:
        # OpenAI allows 0, which keeps only the most likely token.
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
    """A context manager that replaces the engine's field names in errors by the endpoint's."""

    def __init__(self, max_tokens: str, top: str, others: Mapping[str, str] | None = None) -> None:
        """Store the names that differ between endpoints; the others are OpenAI's.

        Args:
            max_tokens: the endpoint's name for the output limit.
            top: the endpoint's name for the number of log-probabilities per token.
            others: further names, for endpoints of another API than OpenAI's. Each maps the
                engine's name to the endpoint's.
        """
        self._others = others or {}
        self._max_tokens = max_tokens
        self._top = top

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """If the block raised an `InvalidRequest`, raise it with the names replaced."""
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
