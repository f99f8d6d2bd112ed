"""Combines `response_format`, the tools and `tool_choice` of a chat request to one grammar."""

from __future__ import annotations

import msgspec

from openai_api.auto_tools import answer_or_calls, strict_calls
from openai_api.forced_tools import call_constraint, forces_call
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.chat import ChatCompletionRequest, tool_names
from runtime.errors import InvalidRequest
from runtime.eventloop.heavy_work import aside
from runtime.requests.sampling_params import GrammarSpec, SamplingParams


async def constrained(
    request: ChatCompletionRequest, sampling: SamplingParams, context: OpenAIContext
) -> SamplingParams:
    """Return sampling parameters whose grammar also covers the request's tools.

    Args:
        request: a checked request.
        sampling: the request's parameters, with the grammar of the answer if there is one.
        context: the server's context.

    Raises:
        InvalidRequest: the tools and the answer's grammar cannot be combined.
    """
    grammar = sampling.grammar
    if forces_call(request):
        grammar = await aside(request.tools, _forced_call, request, grammar, context)
    elif tool_names(request):
        if grammar is None:
            grammar = await strict_calls(request, context)
        elif grammar.kind != "structural_tag":
            # A structural tag needs no addition: it describes the whole output with its calls.
            grammar = await answer_or_calls(request, grammar, context)
    return msgspec.structs.replace(sampling, grammar=grammar)


def _forced_call(
    request: ChatCompletionRequest, answer: GrammarSpec | None, context: OpenAIContext
) -> GrammarSpec:
    if answer is not None:
        raise InvalidRequest(
            f"tool_choice that forces a call cannot be combined with {answer.kind} or "
            "response_format: the answer is a call.",
            param="tool_choice",
        )
    context.service.client.require_grammars("tool_choice that forces a call", "tool_choice")
    return call_constraint(request)
