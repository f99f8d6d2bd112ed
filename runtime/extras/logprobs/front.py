"""Reads the fields of `/generate` about log-probabilities, and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from runtime.client.admission import EngineLimits
from runtime.client.front_extras import AnsweredSample, Asked, FrontExtra
from runtime.errors import InvalidRequest
from runtime.extras.logprobs.answer import LogprobAnswer
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.sampling_params import INT64_MAX

MAX_TOP_LOGPROBS = 1000
MAX_TOKEN_IDS = 1000

_Value = TypeVar("_Value")

Switch = bool | list[bool] | None
Number = int | list[int | None] | None
TokenIds = list[int | list[int] | None] | None


class LogprobFields(Protocol):
    """The fields of `/generate` about log-probabilities; `return_logprob` turns the others on."""

    return_logprob: Switch
    logprob_start_len: Number
    top_logprobs_num: Number
    token_ids_logprob: TokenIds
    return_text_in_logprobs: bool | None


class LogprobsFront(FrontExtra):
    """Returns log-probabilities of output tokens, and of prompt tokens if a start is given."""

    field = "top_logprobs_num"
    advice = "ask for fewer at each position"

    def plan(self, body: LogprobFields, asked: Asked) -> Sequence[ExtraSpec | None] | None:
        """Return the spec for each prompt; `None` if the request wants no log-probabilities.

        Raises:
            InvalidRequest: a list has the wrong length or is combined with `n` above 1, a number is
                out of range, an id is outside the vocabulary, or prompt positions without tokens
                are requested.
        """
        switch, start_len, top_num = (
            body.return_logprob,
            body.logprob_start_len,
            body.top_logprobs_num,
        )
        token_ids = body.token_ids_logprob
        if switch is None and start_len is None and top_num is None and token_ids is None:
            return None
        nested = _nested(token_ids)
        for name, is_list in (
            ("return_logprob", isinstance(switch, list)),
            ("logprob_start_len", isinstance(start_len, list)),
            ("top_logprobs_num", isinstance(top_num, list)),
            ("token_ids_logprob", nested is not None),
        ):
            if is_list and asked.n > 1:
                raise InvalidRequest(f"{name} cannot be a list when n is above 1.", param=name)
        num_prompts, with_text = asked.num_prompts, bool(body.return_text_in_logprobs)
        switches = _column("return_logprob", switch, num_prompts)
        starts = _column("logprob_start_len", start_len, num_prompts)
        tops = _column("top_logprobs_num", top_num, num_prompts)
        flat = [each for each in token_ids or () if isinstance(each, int)]
        ids = [flat] * num_prompts if nested is None else nested
        _check_length("token_ids_logprob", ids, num_prompts)
        specs = [
            _spec(start, top, _checked(wanted, asked.vocab_size), with_text).extra() if on else None
            for on, start, top, wanted in zip(switches, starts, tops, ids, strict=True)
        ]
        if not asked.has_tokens and any(s is not None and s.prompt_start >= 0 for s in specs):
            raise InvalidRequest(
                "input_embeds have no tokens whose log-probabilities could be given.",
                param="logprob_start_len",
            )
        return specs

    def check(self, spec: ExtraSpec, num_prompt: int) -> None:
        """Check the spec against the length of the prompt.

        Raises:
            InvalidRequest: `logprob_start_len` is larger than the prompt.
        """
        if spec.prompt_start > num_prompt:
            raise InvalidRequest(
                f"logprob_start_len ({spec.prompt_start}) is larger than the prompt "
                f"({num_prompt} tokens).",
                param="logprob_start_len",
            )

    def num_numbers(
        self,
        spec: ExtraSpec,
        num_prompt: int,
        num_output: int,
        limits: EngineLimits,  # noqa: ARG002
    ) -> int:
        """Return how many numbers an answer has at most, which the server limits.

        Each most probable token and each reported prompt token counts twice: value and id.
        """
        wanted = LogprobSpec.of(spec.params)
        num_inputs = max(0, num_prompt - wanted.start_len) if wanted.start_len >= 0 else 0
        num_each = 2 * wanted.top_num + len(wanted.token_ids)
        return (num_inputs + num_output) * num_each + 2 * num_inputs

    def answer(self, spec: ExtraSpec, sample: AnsweredSample) -> LogprobAnswer:
        """Return an empty answer for one sample."""
        return LogprobAnswer(LogprobSpec.of(spec.params), sample)


def _spec(start: int | None, top: int | None, ids: list[int], with_text: bool) -> LogprobSpec:
    start = -1 if start is None else start
    if not -1 <= start <= INT64_MAX:
        raise InvalidRequest(
            f"logprob_start_len must be -1 or more and fit in 64 bits, got {start}.",
            param="logprob_start_len",
        )
    top = top or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {top}.",
            param="top_logprobs_num",
        )
    return LogprobSpec(start, top, ids, with_text)


def _checked(ids: list[int] | None, vocab_size: int) -> list[int]:
    if not ids:
        return []
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidRequest(
            f"token_ids_logprob may name at most {MAX_TOKEN_IDS} ids, got {len(ids)}.",
            param="token_ids_logprob",
        )
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"token_ids_logprob must be in [0, {vocab_size}), got {token_id}.",
                param="token_ids_logprob",
            )
    return ids


def _nested(token_ids: TokenIds) -> list[list[int] | None] | None:
    """Return one list of ids for each prompt; `None` if a single list applies to all prompts."""
    if not token_ids or all(isinstance(each, int) for each in token_ids):
        return None
    lists = [each for each in token_ids if not isinstance(each, int)]
    if len(lists) != len(token_ids):
        raise InvalidRequest(
            "token_ids_logprob must be a list of ids or a list of such lists.",
            param="token_ids_logprob",
        )
    return lists


def _column(
    name: str, given: _Value | Sequence[_Value | None] | None, num_prompts: int
) -> list[_Value | None]:
    if isinstance(given, list):
        _check_length(name, given, num_prompts)
        return given
    return [given] * num_prompts  # type: ignore[list-item]  # a list is the only sequence here


def _check_length(name: str, values: Sequence[object], num_prompts: int) -> None:
    if len(values) != num_prompts:
        raise InvalidRequest(
            f"{name} must have one entry for each of the {num_prompts} prompts, got {len(values)}.",
            param=name,
        )


EXTRA = LogprobsFront()
