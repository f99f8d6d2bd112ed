"""The sampling parameters of a `gen`, which override those of the program's `run`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.lang.dtypes import REGEX_OF_DTYPE, STOPS_OF_DTYPE

Stop = str | Sequence[str] | None


def _strings(stop: Any) -> list[str]:
    """Return stop strings as a new list; the caller's list is not used, as it must not change."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)


@dataclass(slots=True)
class SglSamplingParams:
    """Sampling parameters; None means the default of the program or of the back end.

    The names are those of `gen`, except `max_new_tokens` and `min_new_tokens`, which are the
    server's names.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: Stop = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: Stop = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    dtype: str | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    lora_path: str | None = None
    logit_bias: Mapping[str, float] | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None

    def clone(self) -> SglSamplingParams:
        """Return a copy, which may be changed."""
        return dataclasses.replace(self)

    def over(self, defaults: SglSamplingParams) -> SglSamplingParams:
        """Return a copy in which unset parameters have their values from `defaults`."""
        both = zip(_values(self), _values(defaults), strict=True)
        return SglSamplingParams(*[own if own is not None else other for own, other in both])

    @property
    def stops(self) -> list[str]:
        """Return all stop strings as a new list, including those of `dtype`."""
        own = _strings(self.stop)
        return own + [stop for stop in STOPS_OF_DTYPE.get(self.dtype or "", ()) if stop not in own]

    def grammar_regex(self) -> str | None:
        """Return the regular expression that the output must match, or None.

        `dtype` has priority over `regex`.
        """
        return self.regex if self.dtype is None else REGEX_OF_DTYPE[self.dtype]

    def to_srt_kwargs(self) -> dict[str, Any]:
        """Return `sampling_params` for the native route `/generate`.

        The two flags of `global_config` are not included. Every field that SGLang's client sends is
        present; an unset one is None. Other fields are present only if they are set.
        """
        kwargs: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens or 0,
            "n": self.n,
            "stop": self.stops,
            "stop_token_ids": list(self.stop_token_ids or ()),
            "stop_regex": _strings(self.stop_regex),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "ignore_eos": self.ignore_eos,
            "regex": self.grammar_regex(),
            "json_schema": self.json_schema,
        }
        for name in _ONLY_WHEN_SET:
            value = getattr(self, name)
            if value is not None:
                kwargs[name] = value
        return kwargs

    def to_openai_kwargs(self) -> dict[str, Any]:
        """Return the arguments for OpenAI's client, which does not have `top_k` and `min_p`."""
        return {
            "max_tokens": self.max_new_tokens,
            "max_completion_tokens": self.max_new_tokens,
            "n": self.n,
            "stop": self.stops or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def to_litellm_kwargs(self) -> dict[str, Any]:
        """Return the arguments for LiteLLM's function `completion`."""
        return {
            "max_tokens": self.max_new_tokens,
            "stop": self.stops or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        """Return the arguments for Anthropic's `messages.create`.

        `top_k` is included only if it has an effect.
        """
        kwargs: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "stop_sequences": self.stops,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.top_k is not None and self.top_k > 0:
            kwargs["top_k"] = self.top_k
        return kwargs

    def to_vertexai_kwargs(self) -> dict[str, Any]:
        """Return the fields of Vertex AI's generation settings."""
        return {
            "candidate_count": 1,
            "max_output_tokens": self.max_new_tokens,
            "stop_sequences": self.stops,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
        }

    def set_fields(self) -> dict[str, Any]:
        """Return all parameters that are not None, by name."""
        both = zip(_FIELDS, _values(self), strict=True)
        return {name: value for name, value in both if value is not None}


_FIELDS = tuple(field.name for field in dataclasses.fields(SglSamplingParams))
# Function that returns the values of all parameters, in the order of the fields.
_values = operator.attrgetter(*_FIELDS)
_ONLY_WHEN_SET = (
    "repetition_penalty",
    "sampling_seed",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "no_stop_trim",
)


def program_defaults(**given: Any) -> SglSamplingParams:
    """Return SGLang's defaults of `run`, with the values of `given` in their place.

    Raises:
        TypeError: a name is unknown.
    """
    given = {name: value for name, value in given.items() if value is not None}
    return SglSamplingParams(**{**_DEFAULTS, **given})


_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
}
