"""Reasoning parsers, by the names that `--reasoning-parser` accepts."""

from __future__ import annotations

from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser
from runtime.config.registry import Registry

_TAGS = "openai_api.reasoning_parsers.think_tags:ThinkTags"
_ALWAYS = "openai_api.reasoning_parsers.think_tags:AlwaysThinking"

REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry(
    "reasoning parser",
    {
        "qwen3": _TAGS,
        "glm45": "openai_api.reasoning_parsers.glm:Glm45Thinking",
        "deepseek-v3": _TAGS,
        "interns1": _TAGS,
        "nano_v3": _TAGS,
        "qwen3-thinking": _ALWAYS,
        "deepseek-r1": _ALWAYS,
        "step3": _ALWAYS,
        "step3p5": _ALWAYS,
        "minimax": _ALWAYS,
        "minimax-append-think": "openai_api.reasoning_parsers.think_tags:AppendThink",
        "kimi": "openai_api.reasoning_parsers.kimi:KimiThinking",
        "kimi_k2": "openai_api.reasoning_parsers.kimi:KimiK2Thinking",
        "gpt-oss": "openai_api.reasoning_parsers.harmony:HarmonyChannels",
    },
)
