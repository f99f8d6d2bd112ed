"""Which parsers the server uses: named by the operator, or recognised from the model's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from openai_api.chat_template import ChatTemplate
from openai_api.parser_signs import Signs, by_chat_template, by_response_template
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.config.options import AUTO_PARSER, NO_PARSER
from runtime.config.registry import Registry

logger = logging.getLogger(__name__)

_TOOL_FIELDS = ("tool_calls",)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _Recognisable(Protocol):
    signs: Signs


@dataclass(frozen=True)
class ParserNames:
    """The names of both parsers; `None` for none."""

    reasoning: str | None
    tools: str | None


def choose_parsers(
    reasoning: str | None,
    tools: str | None,
    template: ChatTemplate | None,
    response_template: Mapping[str, Any],
) -> ParserNames:
    """Settle both options, and log which parsers these are and why.

    Args:
        reasoning: `--reasoning-parser`: a name, `auto` (as `None` is) or `none`.
        tools: `--tool-call-parser`, likewise.
        template: that writes the prompts.
        response_template: of the model's tokenizer_config.json, unchecked.
    """
    tool_name, tool_reason = _choose(tools, TOOL_PARSERS, _TOOL_FIELDS, template, response_template)
    reasoning_name, reasoning_reason = _choose(
        reasoning, REASONING_PARSERS, _REASONING_FIELDS, template, response_template
    )
    if template is not None:
        logger.info(
            "Chat output: tool_call_parser: %s (%s); reasoning_parser: %s (%s)",
            tool_name or NO_PARSER,
            tool_reason,
            reasoning_name or NO_PARSER,
            reasoning_reason,
        )
    return ParserNames(reasoning_name, tool_name)


def _choose(
    asked: str | None,
    registry: Registry[Any],
    fields: tuple[str, ...],
    template: ChatTemplate | None,
    response_template: Mapping[str, Any],
) -> tuple[str | None, str]:
    if asked not in (None, AUTO_PARSER):
        return (None if asked == NO_PARSER else asked), "as asked"
    candidates: dict[str, Signs] = {}
    for name in registry:
        parser: _Recognisable = registry.load(name)
        candidates[name] = parser.signs
    found = by_response_template(candidates, response_template, fields)
    if found is not None:
        return found, "the response template describes it"
    if template is None:
        return None, "there is no chat template"
    found = by_chat_template(candidates, template.written)
    if found is None:
        return None, "the chat template shows no form that is known"
    signs = " ".join(sign.strip() for sign in candidates[found].template)
    return found, f"the chat template has {signs}"
