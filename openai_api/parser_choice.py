"""Chooses the parsers of reasoning and tool calls: from the options, or from the model's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai_api.call_ids import IdForm
from openai_api.chat_template import ChatTemplate
from openai_api.parser_signs import Signs, by_chat_template, by_response_template, fields_of
from openai_api.parsers import DESCRIBED, Described
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.response_template import described_reasoning, described_tools
from openai_api.tool_parsers.registry import TOOL_PARSERS
from openai_api.tool_parsers.tool_parser import ToolParser
from runtime.config.options import AUTO_PARSER, NO_PARSER
from runtime.config.registry import Registry

logger = logging.getLogger(__name__)

_TOOL_FIELDS = ("tool_calls",)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _Recognisable(Protocol):
    signs: Signs


@dataclass(frozen=True)
class ParserNames:
    """The names of the chosen parsers; `None` for no parser.

    Attributes:
        described: the parsers to use under the name `DESCRIBED`; they were made from the model's
            response template.
    """

    reasoning: str | None
    tools: str | None
    described: Described = field(default_factory=Described, compare=False)

    @property
    def as_options(self) -> dict[str, str]:
        """Return the parsers' names by option name, in which form the server reports them."""
        return {
            "reasoning_parser": self.reasoning or NO_PARSER,
            "tool_call_parser": self.tools or NO_PARSER,
        }


def choose_parsers(
    reasoning: str | None,
    tools: str | None,
    template: ChatTemplate | None,
    response_template: Mapping[str, Any],
) -> ParserNames:
    """Choose both parsers, and log them with the reasons.

    Args:
        reasoning: value of `--reasoning-parser`: a name, `none`, or `auto`, which `None` means too.
        tools: value of `--tool-call-parser`, with the same choices.
        template: the chat template in use.
        response_template: the field of the model's tokenizer_config.json, unchecked.
    """
    described = Described(
        described_reasoning(fields_of(response_template, _REASONING_FIELDS)),
        described_tools(fields_of(response_template, _TOOL_FIELDS)),
    )
    tool_name, tool_reason = _choose(
        tools,
        TOOL_PARSERS,
        fields_of(response_template, _TOOL_FIELDS),
        template,
        is_described=described.tools is not None,
    )
    reasoning_name, reasoning_reason = _choose(
        reasoning,
        REASONING_PARSERS,
        fields_of(response_template, _REASONING_FIELDS),
        template,
        is_described=described.reasoning is not None,
    )
    if template is not None:
        logger.info(
            "Chat output: tool_call_parser: %s (%s); reasoning_parser: %s (%s)",
            tool_name or NO_PARSER,
            tool_reason,
            reasoning_name or NO_PARSER,
            reasoning_reason,
        )
    return ParserNames(reasoning_name, tool_name, described)


def id_form_of(tools: type[ToolParser] | None, template: ChatTemplate | None) -> IdForm | None:
    """Return the form of call ids: that of the parser in use, else that of the template's family.

    The template needs ids of its form even if the calls are read by another parser, or none.
    """
    if tools is not None and tools.id_form is not None:
        return tools.id_form
    if template is None:
        return None
    candidates = {name: TOOL_PARSERS.load(name).signs for name in TOOL_PARSERS}
    found = by_chat_template(candidates, template.written)
    return None if found is None else TOOL_PARSERS.load(found).id_form


def _choose(
    asked: str | None,
    registry: Registry[Any],
    fields: list[Mapping[str, Any]],
    template: ChatTemplate | None,
    *,
    is_described: bool,
) -> tuple[str | None, str]:
    if asked not in (None, AUTO_PARSER):
        return (None if asked == NO_PARSER else asked), "as asked"
    candidates: dict[str, Signs] = {}
    for name in registry:
        parser: _Recognisable = registry.load(name)
        candidates[name] = parser.signs
    found = by_response_template(candidates, fields)
    if found is not None:
        return found, "the response template describes it"
    if is_described:
        return DESCRIBED, "made from the response template"
    if template is None:
        return None, "there is no chat template"
    found = by_chat_template(candidates, template.written)
    if found is None:
        return None, "the chat template shows no known form"
    signs = " ".join(sign.strip() for sign in candidates[found].template)
    return found, f"the chat template has {signs}"
