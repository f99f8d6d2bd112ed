"""Tool-call parsers by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from openai_api.tool_parsers.tool_parser import ToolParser
from runtime.config.registry import Registry

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool-call parser",
    {
        "hermes": "openai_api.tool_parsers.hermes:HermesParser",
        "qwen": "openai_api.tool_parsers.hermes:HermesParser",
        "qwen25": "openai_api.tool_parsers.hermes:HermesParser",
    },
)
