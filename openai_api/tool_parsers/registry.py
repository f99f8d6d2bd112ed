"""Tool-call parsers, by the names that `--tool-call-parser` accepts."""

from __future__ import annotations

from openai_api.tool_parsers.tool_parser import ToolParser
from runtime.config.registry import Registry

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool-call parser",
    {
        "hermes": "openai_api.tool_parsers.hermes:HermesParser",
        "qwen": "openai_api.tool_parsers.hermes:HermesParser",
        "qwen25": "openai_api.tool_parsers.hermes:HermesParser",
        "qwen3_coder": "openai_api.tool_parsers.qwen3_coder:Qwen3CoderParser",
        "llama3": "openai_api.tool_parsers.llama3:Llama3Parser",
        "mistral": "openai_api.tool_parsers.mistral:MistralParser",
        "deepseekv3": "openai_api.tool_parsers.deepseek:DeepSeekV3Parser",
        "deepseek_v3": "openai_api.tool_parsers.deepseek:DeepSeekV3Parser",
        "deepseekv31": "openai_api.tool_parsers.deepseek:DeepSeekV31Parser",
        "deepseek_v31": "openai_api.tool_parsers.deepseek:DeepSeekV31Parser",
        "kimi_k2": "openai_api.tool_parsers.kimi_k2:KimiK2Parser",
        "glm45": "openai_api.tool_parsers.glm45:Glm45Parser",
        "glm47": "openai_api.tool_parsers.glm45:Glm45Parser",
        "glm": "openai_api.tool_parsers.glm45:Glm45Parser",
        "minimax-m2": "openai_api.tool_parsers.minimax_m2:MiniMaxM2Parser",
        "gpt-oss": "openai_api.tool_parsers.gpt_oss:GptOssParser",
        "pythonic": "openai_api.tool_parsers.pythonic:PythonicParser",
    },
)
