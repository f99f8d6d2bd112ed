"""The one grammar of a chat answer, from `response_format`, the tools and `tool_choice`."""

from __future__ import annotations

import msgspec

from openai_api.auto_tools import answer_or_calls, strict_calls
from openai_api.chat_prompt import ChatPrompt
from openai_api.forced_tools import call_constraint, forces_call
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.chat import ChatCompletionRequest, tool_names
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarSpec, SamplingParams


async def constrained(
    request: ChatCompletionRequest, sampling: SamplingParams, context: OpenAIContext
) -> SamplingParams:
    """Sampling with the grammar that the request's tools ask for as well.

    Args:
        request: checked.
        sampling: its own, with the grammar of the answer if it has one.
        context: the server's.

    Raises:
        InvalidRequest: the tools and the answer's grammar do not go together.
    """
    grammar = sampling.grammar
    if forces_call(request):
        grammar = _forced_call(request, grammar, context)
    elif tool_names(request):
        if grammar is None:
            grammar = await strict_calls(request, context)
        elif grammar.kind != "structural_tag":
            # A structural tag describes the whole output, its calls included.
            grammar = await answer_or_calls(request, grammar, context)
    return msgspec.structs.replace(sampling, grammar=grammar)


def _forced_call(
    request: ChatCompletionRequest, answer: GrammarSpec | None, context: OpenAIContext
) -> GrammarSpec:
    if answer is not None:
        raise InvalidRequest(
            f"tool_choice that forces a call does not go with {answer.kind} or "
            "response_format: the answer is a call.",
            param="tool_choice",
        )
    if context.service.client.grammars is None:
        raise InvalidRequest(
            "tool_choice that forces a call needs structured output, which is off in this server.",
            param="tool_choice",
        )
    return call_constraint(request)


def after_reasoning(
    sampling: SamplingParams, prompt: ChatPrompt, context: OpenAIContext
) -> SamplingParams:
    """Let a grammar hold for the answer only, where the output begins inside reasoning.

    Raises:
        InvalidRequest: the model's end of reasoning is not one token.
    """
    parsers = context.parsers
    if sampling.grammar is None or parsers.reasoning is None:
        return sampling
    if not parsers.reasoning(prompt_is_open=prompt.is_open).is_reasoning:
        return sampling
    if parsers.close_id is None:
        raise InvalidRequest(
            f"{sampling.grammar.kind}: this model's end of reasoning is not one token, so a "
            "constraint needs a prompt that turns reasoning off.",
            param=sampling.grammar.kind,
        )
    return msgspec.structs.replace(sampling, grammar_after=parsers.close_id)
