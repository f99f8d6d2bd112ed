"""The log-probability fields of `/generate`, read for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from runtime.errors import InvalidRequest
from runtime.ipc.messages import LogprobSpec

MAX_TOP_LOGPROBS = 1000
MAX_TOKEN_IDS = 1000

_Value = TypeVar("_Value")

Switch = bool | list[bool] | None
Number = int | list[int | None] | None
TokenIds = list[int | list[int] | None] | None


def plan_logprobs(
    return_logprob: Switch,
    start_len: Number,
    top_num: Number,
    token_ids: TokenIds,
    num_prompts: int,
    n: int,
) -> list[LogprobSpec | None]:
    """What each prompt's samples want; the other fields mean nothing where `return_logprob` is off.

    Raises:
        InvalidRequest: a list of the wrong length, lists together with `n` above 1, or a number
            out of range.
    """
    nested = _nested(token_ids)
    for name, is_list in (
        ("return_logprob", isinstance(return_logprob, list)),
        ("logprob_start_len", isinstance(start_len, list)),
        ("top_logprobs_num", isinstance(top_num, list)),
        ("token_ids_logprob", nested is not None),
    ):
        if is_list and n > 1:
            raise InvalidRequest(f"{name} cannot be a list when n is above 1.", param=name)
    switches = _column("return_logprob", return_logprob, num_prompts)
    starts = _column("logprob_start_len", start_len, num_prompts)
    tops = _column("top_logprobs_num", top_num, num_prompts)
    flat = [each for each in token_ids or () if isinstance(each, int)]
    ids = [flat] * num_prompts if nested is None else nested
    _check_length("token_ids_logprob", ids, num_prompts)
    return [
        _spec(start, top, wanted) if switch else None
        for switch, start, top, wanted in zip(switches, starts, tops, ids, strict=True)
    ]


def _spec(start: int | None, top: int | None, ids: list[int] | None) -> LogprobSpec:
    start = -1 if start is None else start
    if start < -1:
        raise InvalidRequest(
            f"logprob_start_len must be -1 or more, got {start}.", param="logprob_start_len"
        )
    top = top or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {top}.",
            param="top_logprobs_num",
        )
    ids = ids or []
    if len(ids) > MAX_TOKEN_IDS:
        raise InvalidRequest(
            f"token_ids_logprob may name at most {MAX_TOKEN_IDS} ids, got {len(ids)}.",
            param="token_ids_logprob",
        )
    return LogprobSpec(start, top, ids)


def _nested(token_ids: TokenIds) -> list[list[int] | None] | None:
    """One list for each prompt; `None` where one list is for all."""
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
