"""Runs `select` with requests to `/generate`, for servers without a route that scores choices.

The first request caches the prompt, and the second scores all choices after it. If the method needs
scores without the prompt, a third request scores the choices alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.lang.backend.base import Prompt
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod, Entry, mean_logprob

Post = Callable[[str, dict[str, Any]], Awaitable[Any]]

# Log-probabilities are requested from two tokens before the prompt's end on. A choice may merge
# with the prompt's last token, and the first log-probability that a server returns is null.
_BOUNDARY_TOKENS = 2


async def classic_select(
    post: Post, s: Prompt, choices: list[str], method: ChoicesSamplingMethod
) -> ChoicesDecision:
    """Score `choices` as continuations of `s.text_`, and return the decision of `method`."""
    prompt_len = await _cache_prompt(post, s)
    scored = await post(
        "/generate",
        {
            "text": [s.text_ + choice for choice in choices],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": max(prompt_len - _BOUNDARY_TOKENS, 0),
            **(
                {"image_data": [[one.data for one in s.images_]] * len(choices)}
                if s.images_
                else {}
            ),
        },
    )
    metas = [one["meta_info"] for one in scored]
    windows: list[list[Entry]] = [list(meta["input_token_logprobs"]) for meta in metas]
    entries = [
        own_tokens(window, choice, prompt_len)
        for window, choice in zip(windows, choices, strict=True)
    ]
    alone = None
    if method.requires_unconditional_logprobs:
        alone = await _unconditional(post, entries)
    return method(
        choices=choices,
        normalized_prompt_logprobs=[mean_logprob(tokens) for tokens in entries],
        input_token_logprobs=entries,
        output_token_logprobs=[list(meta.get("output_token_logprobs") or []) for meta in metas],
        unconditional_token_logprobs=alone,
    )


async def _cache_prompt(post: Post, s: Prompt) -> int:
    """Let the server cache the prompt, and return its number of tokens (0 if it is empty)."""
    if not s.text_:
        return 0
    payload: dict[str, Any] = {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
    if s.images_:
        payload["image_data"] = [one.data for one in s.images_]
    answer = await post("/generate", payload)
    return int(answer["meta_info"]["prompt_tokens"])


def own_tokens(window: Sequence[Entry], choice: str, prompt_len: int) -> list[Entry]:
    """Return the entries of the tokens that belong to the choice.

    Args:
        window: entries of all tokens from the second last token of the prompt on.
        choice: the text of the choice.
        prompt_len: number of tokens of the prompt alone.

    The second entry is the prompt's last token, unless the choice has merged with this token. If
    the texts of the later entries together are the choice, the two have not merged.
    """
    num_boundary = min(prompt_len, _BOUNDARY_TOKENS)
    rest = list(window[num_boundary:])
    texts = [entry[2] if len(entry) > 2 else None for entry in rest]
    is_whole = all(isinstance(text, str) for text in texts) and "".join(map(str, texts)) == choice
    if is_whole or num_boundary == 0:
        return rest
    return list(window[num_boundary - 1 :])


async def _unconditional(post: Post, entries: list[list[Entry]]) -> list[list[Entry]]:
    with_tokens = [index for index, tokens in enumerate(entries) if tokens]
    alone: list[list[Entry]] = [[] for _ in entries]
    if with_tokens:
        scored = await post(
            "/generate",
            {
                "input_ids": [[int(entry[1]) for entry in entries[i]] for i in with_tokens],
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        for index, one in zip(with_tokens, scored, strict=True):
            alone[index] = list(one["meta_info"]["input_token_logprobs"])
    return alone
