"""Reasoning parsers by the names that `--reasoning-parser` takes."""

from __future__ import annotations

from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser
from runtime.config.registry import Registry

REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry(
    "reasoning parser",
    {
        "qwen3": "openai_api.reasoning_parsers.think_tags:ThinkTags",
        "glm45": "openai_api.reasoning_parsers.think_tags:ThinkTags",
        "qwen3-thinking": "openai_api.reasoning_parsers.think_tags:AlwaysThinking",
        "deepseek-r1": "openai_api.reasoning_parsers.think_tags:AlwaysThinking",
    },
)
