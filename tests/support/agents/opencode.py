"""Simulates OpenCode, which sends requests to `/v1/chat/completions` through the AI SDK.

Source: `packages/openai-compatible` (vercel/ai) for the form of messages and tools, and the
settings of `anomalyco/opencode`. All texts are written for these tests.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, ClassVar

from tests.support.agents.script import REPOSITORY, SYSTEM, ToolUse
from tests.support.agents.session import AgentSession


def _tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    described = {"name": name, "description": f"Does what {name} says.", "parameters": schema}
    return {"type": "function", "function": described}


_TEXT = {"type": "string", "description": "A text."}
TOOLS = [
    _tool("bash", ["command", "description"], command=_TEXT, description=_TEXT),
    _tool("edit", ["filePath", "newString"], filePath=_TEXT, newString=_TEXT),
    _tool("grep", ["pattern"], pattern=_TEXT),
]


class OpenCodeSession(AgentSession):
    """Simulates a conversation in OpenCode."""

    path = "/v1/chat/completions"
    headers: ClassVar[dict[str, str]] = {
        "authorization": "Bearer none",
        "user-agent": "ai-sdk/openai-compatible/2.0.38",
    }

    def __init__(self, cut_turn: int | None = None) -> None:
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"{SYSTEM}\n<env>\n  Platform: linux\n</env>"},
            {"role": "system", "content": REPOSITORY},
        ]
        super().__init__(cut_turn)

    def request(self) -> dict[str, Any]:
        return {
            "model": "headrace",
            "max_tokens": 32_000,
            "top_p": 1,
            "messages": list(self._messages),
            "tools": TOOLS,
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        match use.kind:
            case "run":
                return "bash", {"command": use.text, "description": "Runs it"}
            case "patch":
                return "edit", {"filePath": "/repo/gate.py", "newString": use.text}
        return "grep", {"pattern": use.text}

    def ask(self, task: str) -> None:
        self._messages.append({"role": "user", "content": task})

    def keep(self, answered: dict[str, Any]) -> None:
        """Add `answered`, the message that was built from the stream."""
        message: dict[str, Any] = {"role": "assistant", "content": answered["content"] or ""}
        if answered.get("reasoning_content"):
            message["reasoning_content"] = answered["reasoning_content"]
        if answered["tool_calls"]:
            message["tool_calls"] = [_again(call) for call in answered["tool_calls"]]
        self._messages.append(message)

    def give_back(self, answered: dict[str, Any], results: list[tuple[ToolUse, str]]) -> None:
        assert len(answered["tool_calls"]) == len(results), "a call was lost"
        for call, (_, text) in zip(answered["tool_calls"], results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def _again(call: dict[str, Any]) -> dict[str, Any]:
    # The SDK parses the arguments and writes them again in its own form. Arguments that it cannot
    # parse are sent back as they are.
    arguments: Any = call["function"]["arguments"]
    with contextlib.suppress(json.JSONDecodeError):
        arguments = json.loads(arguments)
    arguments = json.dumps(arguments, separators=(",", ":"))
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}
