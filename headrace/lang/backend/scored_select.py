"""Runs `select` by one request: the route `/v1/select`, or the engine's method `select`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.lang.backend.base import Prompt
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod, mean_logprob

_COUNTS = ("prompt_tokens", "cached_tokens", "computed_tokens")


def select_payload(s: Prompt, choices: list[str], method: ChoicesSamplingMethod) -> dict[str, Any]:
    """Return the body of a request to `/v1/select`."""
    return {
        "text": s.text_,
        "choices": choices,
        "unconditional": method.requires_unconditional_logprobs,
    }


def decide(
    answer: Mapping[str, Any], choices: list[str], method: ChoicesSamplingMethod
) -> ChoicesDecision:
    """Let `method` decide between choices that were scored.

    Args:
        answer: the answer of `/v1/select`.
        choices: the texts.
        method: the method that decides.

    Returns:
        The decision. Its meta information has the token counts, and in `probs` the probability of
        each choice relative to all choices.
    """
    scored = answer["choices"]
    entries = [one["token_logprobs"] for one in scored]
    decision = method(
        choices=choices,
        normalized_prompt_logprobs=[mean_logprob(tokens) for tokens in entries],
        input_token_logprobs=entries,
        output_token_logprobs=[[] for _ in scored],
        unconditional_token_logprobs=(
            [one["unconditional_token_logprobs"] for one in scored]
            if method.requires_unconditional_logprobs
            else None
        ),
    )
    meta = answer["meta_info"]
    decision.meta_info.update({name: meta[name] for name in _COUNTS})
    decision.meta_info["probs"] = [one["prob"] for one in scored]
    return decision
