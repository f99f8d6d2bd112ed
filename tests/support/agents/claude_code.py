"""Simulates Claude Code, which sends requests to `/v1/messages`.

Source: requests that public gateways, tests and issues show. They have system blocks, a billing
line, a moving `cache_control`, betas, `metadata`, `context_management`, and system messages between
the others. All texts are written for these tests.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from tests.support.agents.script import REPOSITORY, SYSTEM, ToolUse
from tests.support.agents.session import AgentSession

_MARK = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.280.{0:03x}; cc_entrypoint=cli; cch={0:05x};"


def _tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"name": name, "description": f"Does what {name} says.", "input_schema": schema}


_TEXT = {"type": "string", "description": "A text."}
TOOLS = [
    _tool("Bash", ["command"], command=_TEXT, timeout={"type": "number"}, description=_TEXT),
    _tool("Edit", ["file_path", "new_string"], file_path=_TEXT, new_string=_TEXT),
    _tool("Grep", ["pattern"], pattern=_TEXT, path=_TEXT),
    _tool("TodoWrite", ["todos"], todos={"type": "array", "items": _TEXT}),
]
TOOLS[-1]["cache_control"] = _MARK


class ClaudeCodeSession(AgentSession):
    """Simulates a conversation in Claude Code."""

    path = "/v1/messages?beta=true"
    headers: ClassVar[dict[str, str]] = {
        "x-api-key": "none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
        "context-management-2025-06-27,mid-conversation-system-2026-04-07,effort-2025-11-24",
        "user-agent": "claude-cli/2.1.280 (external, cli)",
        "x-app": "cli",
    }

    def __init__(self, cut_turn: int | None = None) -> None:
        self._messages: list[dict[str, Any]] = []
        super().__init__(cut_turn)

    def request(self) -> dict[str, Any]:
        messages = [dict(message) for message in self._messages]
        # In each request the mark is at the newest block.
        last = messages[-1]
        last["content"] = [*last["content"][:-1], {**last["content"][-1], "cache_control": _MARK}]
        user = {"device_id": "d" * 64, "account_uuid": "", "session_id": "0197-4f2e"}
        return {
            "model": "claude-headrace",
            "max_tokens": 32_000,
            "system": [
                {"type": "text", "text": BILLING.format(7919 * (self.turn + 1) % 4096)},
                {"type": "text", "text": "You are a coding agent.", "cache_control": _MARK},
                {"type": "text", "text": SYSTEM, "cache_control": _MARK},
            ],
            "messages": messages,
            "tools": TOOLS,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": json.dumps(user)},
            "stream": True,
        }

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        match use.kind:
            case "run":
                return "Bash", {"command": use.text, "description": "Runs it"}
            case "patch":
                return "Edit", {"file_path": "/repo/gate.py", "new_string": use.text}
        return "Grep", {"pattern": use.text}

    def ask(self, task: str) -> None:
        content = [_text(task)]
        if not self._messages:
            content.insert(0, _text(f"<system-reminder>\n{REPOSITORY}\n</system-reminder>\n"))
        self._messages.append({"role": "user", "content": content})

    def keep(self, answered: dict[str, Any]) -> None:
        """Add `answered`, the message that was built from the stream."""
        self._messages.append({"role": "assistant", "content": answered["content"]})

    def give_back(self, answered: dict[str, Any], results: list[tuple[ToolUse, str]]) -> None:
        calls = [block for block in answered["content"] if block["type"] == "tool_use"]
        assert len(calls) == len(results), "a call was lost"
        content: list[dict[str, Any]] = []
        for block, (use, text) in zip(calls, results, strict=True):
            # The results of Claude Code's own tools are texts, those of other tools lists of
            # blocks.
            given: Any = [_text(text)] if use.kind == "find" else text
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": given}
            failed = {"is_error": True} if use.kind == "patch" and self.turn % 2 else {}
            content.append({**result, **failed})
        if self.turn % 4 == 0:
            content.append(_text("<system-reminder>\nA file has changed.\n</system-reminder>"))
        self._messages.append({"role": "user", "content": content})
        if self.turn % 6 == 1:
            self._messages.append({"role": "system", "content": [_text("The user looks away.")]})


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
