"""Writes the token counts of a response in the format of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

from openai_api.openai_context import OpenAIContext
from openai_api.usage import TokenCount, break_of


def usage_of_response(
    count: TokenCount, context: OpenAIContext, before: TokenCount | None = None
) -> dict[str, Any]:
    """Return the object `usage` of a response.

    Args:
        count: the token counts of the answer.
        context: the server's context.
        before: the token counts of a summary that was made before the answer; they are added.
    """
    counts = [count] if before is None else [count, before]
    num_input = sum(each.prompt for each in counts)
    num_output = sum(each.completion for each in counts)
    reports = context.service.config.http.enable_cache_report
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": sum(each.cached for each in counts) if reports else 0,
            "cache_write_tokens": 0,
            **break_of(count),
        },
        "output_tokens": num_output,
        "output_tokens_details": {
            "reasoning_tokens": sum(each.reasoning for each in counts if each.has_reasoned)
        },
        "total_tokens": num_input + num_output,
    }
