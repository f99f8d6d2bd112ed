"""Simulates Codex, which sends the whole conversation with each request to `/v1/responses`.

Source: `codex-rs/codex-api` and `codex-rs/protocol` (openai/codex), for the names of fields and
items, and for which of them are sent back. All texts are written for these tests.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tests.support.agents.script import REPOSITORY, SYSTEM, ToolUse
from tests.support.agents.session import AgentSession

_SESSION = "0197-4f2e-headrace"
_PATCH_GRAMMAR = 'start: begin hunk+ end\nbegin: "*** Begin Patch" LF\nhunk: /.+/ LF\n'


def _function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": f"Does what {name} says.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


_TEXT = {"type": "string", "description": "A text."}
TOOLS: list[dict[str, Any]] = [
    _function("exec_command", ["cmd"], cmd=_TEXT, workdir=_TEXT, yield_time_ms={"type": "number"}),
    _function("update_plan", ["plan"], explanation=_TEXT, plan={"type": "array", "items": _TEXT}),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files; the patch is plain text.",
        "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH_GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False},
    {
        "type": "namespace",
        "name": "mcp__code__",
        "description": "Tools of a server.",
        "tools": [_function("find", ["pattern"], pattern=_TEXT)],
    },
]


class CodexSession(AgentSession):
    """Simulates a conversation in Codex."""

    path = "/v1/responses"
    limit_field = "max_output_tokens"
    headers: ClassVar[dict[str, str]] = {
        "authorization": "Bearer none",
        "accept": "text/event-stream",
        "originator": "codex_cli_rs",
        "user-agent": "codex_cli_rs/0.128.0 (Linux 6.8; x86_64)",
        "session_id": _SESSION,
    }

    def __init__(self, cut_turn: int | None = None) -> None:
        context = "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n"
        self._input: list[dict[str, Any]] = [
            _message("developer", "<permissions>Commands run in a sandbox.</permissions>"),
            _message("user", f"# AGENTS.md\n{REPOSITORY}", f"{context}</environment_context>"),
        ]
        super().__init__(cut_turn)

    def request(self) -> dict[str, Any]:
        return {
            "model": "headrace",
            "instructions": SYSTEM,
            "input": list(self._input),
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": _SESSION,
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "0"},
        }

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        match use.kind:
            case "run":
                return "exec_command", {"cmd": use.text, "yield_time_ms": 1000}
            case "patch":
                return "apply_patch", {"input": use.text}
        return "mcp__code____find", {"pattern": use.text}

    def ask(self, task: str) -> None:
        self._input.append(_message("user", task))

    def keep(self, answered: list[dict[str, Any]]) -> None:
        """Add `answered`, the completed items of the stream."""
        for item in answered:
            kept = {key: value for key, value in item.items() if key != "id"}
            match item["type"]:
                case "message":
                    texts = [{"type": "output_text", "text": p["text"]} for p in item["content"]]
                    kept = {"type": "message", "role": "assistant", "content": texts}
                case "reasoning" if self.turn % 2:
                    # Older versions omit fields that they regard as the server's own.
                    del kept["content"], kept["status"]
                case "function_call":
                    del kept["status"]
            self._input.append(kept)

    def give_back(self, answered: list[dict[str, Any]], results: list[tuple[ToolUse, str]]) -> None:
        calls = [item for item in answered if item["type"].endswith("_call")]
        assert len(calls) == len(results), "a call was lost"
        for item, (use, text) in zip(calls, results, strict=True):
            output: Any = text
            if use.kind == "find":
                # External tools return a list.
                output = [{"type": "input_text", "text": text}]
            self._input.append(
                {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output}
            )


class CodexLiteSession(CodexSession):
    """Simulates a Codex that sends its tools as an input item, its own ones in a namespace."""

    def request(self) -> dict[str, Any]:
        own = [tool for tool in TOOLS if tool["type"] in ("function", "custom")]
        space = {"type": "namespace", "name": "functions", "description": "", "tools": own}
        others = [tool for tool in TOOLS if tool not in own]
        item = {"type": "additional_tools", "role": "developer", "tools": [space, *others]}
        body = super().request()
        return {**body, "tools": [], "input": [item, *body["input"]]}

    def call(self, use: ToolUse) -> tuple[str, dict[str, Any]]:
        name, arguments = super().call(use)
        return (name if use.kind == "find" else f"functions__{name}"), arguments


def _message(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}
