"""Finds the tokens that begin and end thoughts, which the engine needs for budgets and grammars."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from openai_api.chat_prompt import ChatPrompt
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ThinkingTokens
from openai_api.schemas.chat import ChatCompletionRequest, tool_names
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import SamplingParams, ThinkingSpec


def keeps_budget(request: ChatCompletionRequest, context: OpenAIContext) -> bool:
    """Whether a request may limit its thoughts, given its tools and the model's parsers."""
    kind, tokens = context.parsers.reasoning, context.parsers.thinking
    if kind is None or tokens is None:
        return False
    is_strict = any(tool["function"].get("strict") for tool in request.tools or ())
    return not (kind.bridge and is_strict)


@dataclass(frozen=True)
class _Wish:
    """The field of the request because of which the engine must know where thoughts end."""

    field: str
    budget: int | None


def with_thoughts(
    sampling: SamplingParams,
    body: ChatCompletionRequest,
    prompt: ChatPrompt,
    context: OpenAIContext,
) -> SamplingParams:
    """Return sampling parameters that tell the engine how to recognise thoughts, if it must.

    A grammar then applies to the answer only, and thoughts are limited to their budget.

    Args:
        sampling: the parameters, with the grammar of the answer if there is one.
        body: the request.
        prompt: the prompt made from the request.
        context: the server's context.

    Raises:
        InvalidRequest: tokens do not mark the model's thoughts, or the budget is negative.
    """
    if body.max_thinking_tokens is not None and body.max_thinking_tokens < 0:
        raise InvalidRequest(
            f"max_thinking_tokens must be at least 0, got {body.max_thinking_tokens}.",
            param="max_thinking_tokens",
        )
    wish = _wish(sampling, body)
    if wish is None:
        return sampling
    kind, tokens = context.parsers.reasoning, context.parsers.thinking
    if kind is None:
        if wish.budget is None:
            return sampling
        raise InvalidRequest(
            "max_thinking_tokens: this server does not separate reasoning from the answer, which "
            "needs a parser (--reasoning-parser).",
            param="max_thinking_tokens",
        )
    begins_inside = kind(prompt_is_open=prompt.is_open).is_reasoning
    if tokens is None:
        if not begins_inside and not kind.lead and wish.budget is None:
            return sampling
        raise InvalidRequest(
            f"{wish.field}: this model's end of reasoning is not one token, so the prompt must "
            "turn reasoning off.",
            param=wish.field,
        )
    if kind.bridge and sampling.grammar is not None and sampling.grammar.shows_special:
        # gpt-oss writes thoughts as messages like all others, and a grammar of calls allows such
        # messages as text. So the grammar covers the thoughts, and a call may come before any.
        if wish.budget is None:
            return sampling
        raise InvalidRequest(
            "max_thinking_tokens excludes strict and allowed_tools for this model, which "
            "may call a function without reasoning first.",
            param="max_thinking_tokens",
        )
    if not begins_inside and not _may_begin(tokens, body, prompt):
        return sampling
    # With tools and no grammar, a call may follow the thoughts, so no answer's beginning is forced.
    leads_on = sampling.grammar is not None or not tool_names(body)
    bridge = tokens.bridge_ids if leads_on else ()
    tokens = tokens.where(may_call=may_call(body, sampling))
    thinking = ThinkingSpec(
        open_ids=[] if begins_inside else list(tokens.open_ids),
        lead_ids=[] if begins_inside else list(tokens.lead_ids),
        end_ids=[tokens.close_id],
        implied_ids=list(tokens.implied_ids),
        bridge_ids=list(bridge),
        budget=wish.budget,
        forced_ids=[] if wish.budget is None else [*tokens.forced_ids, *bridge],
    )
    return msgspec.structs.replace(sampling, thinking=thinking)


def may_call(body: ChatCompletionRequest, sampling: SamplingParams) -> bool:
    """Whether the output may have calls in the model's own format, even within its thoughts.

    A structural tag is the only grammar that allows such calls. The first token of a call ends the
    thoughts.
    """
    grammar = sampling.grammar
    return bool(tool_names(body)) and (grammar is None or grammar.kind == "structural_tag")


def _may_begin(tokens: ThinkingTokens, body: ChatCompletionRequest, prompt: ChatPrompt) -> bool:
    """Whether an output that does not begin inside thoughts may begin with thoughts."""
    if tokens.lead_ids:
        # The prompt cannot turn these models' thoughts off. But an answer that is continued has
        # begun.
        return not body.continue_final_message
    return bool(tokens.open_ids) and prompt.may_think


def _wish(sampling: SamplingParams, body: ChatCompletionRequest) -> _Wish | None:
    if body.max_thinking_tokens is not None:
        return _Wish("max_thinking_tokens", body.max_thinking_tokens)
    if sampling.grammar is not None:
        return _Wish(sampling.grammar.kind, None)
    return None
