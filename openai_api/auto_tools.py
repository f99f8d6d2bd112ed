"""Grammars for `tool_choice` auto: the model writes either an answer or tool calls.

Calls have the format that the tool-call parser reads. The arguments of a function with `strict`
follow its schema; arguments of other functions are any JSON object. If only some tools are allowed,
the grammar allows only their calls.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import orjson

from openai_api.call_format import OfferedFunction, calls_alone, text_with_calls
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.chat import (
    ChatCompletionRequest,
    NamedToolChoice,
    callable_tools,
    tool_names,
)
from openai_api.tool_parsers.tool_parser import CallForm
from runtime.client.grammar_client import GrammarCompiler
from runtime.errors import InvalidRequest
from runtime.eventloop.offload import OffloadPool
from runtime.grammar.limits import check_grammar
from runtime.grammar.schema_check import MAX_JSON_BYTES, check_schema, parse_json
from runtime.requests.sampling_params import GrammarSpec

logger = logging.getLogger(__name__)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Number of formats in a cache. Agents send the same tools with every request.
_NUM_KEPT = 32
# Bytes. Smaller tools are checked on the event loop, which takes a millisecond or two; larger ones
# on a thread.
_SMALL = 8 * 1024
_CHECKING = OffloadPool("checking of tools", workers=1, max_queued=1024, timeout_s=30.0)


async def strict_calls(
    request: ChatCompletionRequest, context: OpenAIContext
) -> GrammarSpec | None:
    """Make a grammar of free text and calls, where calls of strict functions follow their schema.

    Returns:
        `None` if the request needs no grammar, or if none can be made. In the latter case `strict`
        is not enforced, and a call of a function that is not allowed is returned as text.
    """
    grammars, form = context.service.client.grammars, context.parsers.call_form
    if form is None or grammars is None or not _lets_text_pass(context):
        return None
    calls = await _strict_calls(request, form)
    if calls is None and isinstance(request.tool_choice, NamedToolChoice):
        calls = _plain_calls(request, form)
    if calls is None:
        return None
    spec = _spec(calls.among_text, context)
    try:
        await _compile(grammars, spec)
    except InvalidRequest as error:
        _log_unfollowed(error)
        return None
    return spec


async def answer_or_calls(
    request: ChatCompletionRequest, answer: GrammarSpec, context: OpenAIContext
) -> GrammarSpec:
    """Make a grammar that allows either an answer that follows `answer`, or only calls.

    Raises:
        InvalidRequest: `answer` is invalid, or cannot be combined with calls.
    """
    form, grammars = context.parsers.call_form, context.service.client.grammars
    if form is not None and not form.stands_alone:
        form = None
    if grammars is None:
        # Structured output is off. `answer` alone is refused later, with or without tools.
        return answer
    name = "response_format" if request.response_format is not None else answer.kind
    if form is None:
        raise InvalidRequest(
            f"{name} with tools: the answer would be a call or follow the constraint, for which "
            "this server needs a tool-call parser whose calls a grammar can describe "
            "(--tool-call-parser). Set tool_choice to none for an answer, to required for a call.",
            param=name,
        )
    strict = await _strict_calls(request, form)
    if strict is not None:
        wished = _either(answer, strict, context)
        try:
            await _compile(grammars, wished)
        except InvalidRequest as error:
            _log_unfollowed(error)
        else:
            return wished
    plain = _either(answer, _plain_calls(request, form), context)
    try:
        await _compile(grammars, plain)
    except InvalidRequest as error:
        # An error in `answer` itself is reported first, under its own name.
        check_grammar(answer)
        message = error.message.replace("structural_tag", f"{name} with tools", 1)
        raise InvalidRequest(message, param=name) from None
    return plain


def _lets_text_pass(context: OpenAIContext) -> bool:
    """Whether the free text in a grammar allows everything that the model writes besides calls."""
    parsers = context.parsers
    # Thoughts may be marked by special tokens, which a grammar's free text excludes, unless the
    # engine handles thoughts itself. And without an end-of-text token, the grammar would end the
    # output as soon as it may end.
    thinks_freely = parsers.reasoning is None or parsers.thinking is not None
    return thinks_freely and bool(context.service.model.eos_token_ids)


def _either(answer: GrammarSpec, calls: _Calls, context: OpenAIContext) -> GrammarSpec:
    return _spec({"type": "or", "elements": [_format(answer), calls.alone]}, context)


def _format(answer: GrammarSpec) -> dict[str, Any]:
    match answer.kind:
        case "json_schema":
            schema = parse_json(answer.text, answer.kind)
            return {"type": "json_schema", "json_schema": schema}
        case "regex":
            return {"type": "regex", "pattern": answer.text}
        case "ebnf":
            return {"type": "grammar", "grammar": answer.text}
        case "structural_tag":
            raise AssertionError("a structural tag describes calls itself")


@dataclass(frozen=True)
class _Calls:
    """The structural-tag formats of a request's calls, as JSON.

    Attributes:
        among_text: calls with free text around them.
        alone: one or more calls, and nothing else.
        is_strict: whether the arguments of at least one function must follow its schema.
    """

    among_text: orjson.Fragment
    alone: orjson.Fragment
    is_strict: bool


async def _strict_calls(request: ChatCompletionRequest, form: CallForm) -> _Calls | None:
    """Make the formats of calls of the request's functions; `None` if no function has `strict`."""
    functions = [
        {key: tool["function"].get(key) for key in ("name", "parameters", "strict")}
        for tool in callable_tools(request)
    ]
    if not any(function["strict"] for function in functions):
        return None
    encoded = msgspec.json.encode(functions)
    if len(encoded) > MAX_JSON_BYTES:
        # The formats would exceed the size limit of a grammar.
        return None
    if len(encoded) <= _SMALL:
        calls = _calls(encoded, form)
    else:
        calls = await _CHECKING.run(_calls, encoded, form)
    return calls if calls.is_strict else None


def _plain_calls(request: ChatCompletionRequest, form: CallForm) -> _Calls:
    """Make the formats of calls whose arguments are any JSON object."""
    functions = msgspec.json.encode([{"name": each} for each in tool_names(request)])
    return _calls(functions, form)


@lru_cache(_NUM_KEPT)
def _calls(functions: bytes, form: CallForm) -> _Calls:
    """Make the formats of calls of `functions`.

    Args:
        functions: JSON of the request's functions, each with at least its name.
        form: the format of calls that the tool-call parser reads.
    """
    offered = [
        OfferedFunction(function["name"], _strict_schema(function))
        for function in msgspec.json.decode(functions)
    ]
    return _Calls(
        orjson.Fragment(orjson.dumps(text_with_calls(form, offered))),
        orjson.Fragment(orjson.dumps(calls_alone(form, offered))),
        any(each.schema is not _ANY_OBJECT for each in offered),
    )


def _strict_schema(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    if not function.get("strict") or not schema:
        return _ANY_OBJECT
    try:
        check_schema(schema, "parameters")
        orjson.dumps(schema)
    except (InvalidRequest, orjson.JSONEncodeError) as error:
        _log_unfollowed(error)
        return _ANY_OBJECT
    return dict(schema)


def _log_unfollowed(error: Exception) -> None:
    logger.debug("strict is not followed: %s", error)


def _spec(form: dict[str, Any] | orjson.Fragment, context: OpenAIContext) -> GrammarSpec:
    tag = {"type": "structural_tag", "format": form}
    # The output of a request with tools shows special tokens if the parser needs them.
    shows_special = context.parsers.special_calls
    return GrammarSpec("structural_tag", orjson.dumps(tag).decode(), shows_special)


async def _compile(grammars: GrammarCompiler, spec: GrammarSpec) -> None:
    """Compile the grammar now, so that a failure is known before the request is sent.

    Raises:
        InvalidRequest: the grammar cannot be compiled.
        Overloaded: the machine was too busy to find out.
    """
    _, compiled = grammars.compile(spec)
    # If this request is cancelled, compilation goes on, because others may wait for it.
    await asyncio.shield(compiled)
