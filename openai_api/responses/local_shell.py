"""The tool `local_shell`, which runs commands on the client's machine.

In the API it is a tool type of its own. For the model it is a function.
"""

from __future__ import annotations

from typing import Any

import msgspec

NAME = "local_shell"
FUNCTION = {
    "name": NAME,
    "description": "Run a command on the user's machine, and get what it prints.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "description": "The program and its arguments.",
            },
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class ShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The command to run. The model does not set `env` and `user`."""

    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


_DECODER = msgspec.json.Decoder(ShellAction)


def arguments_of(action: ShellAction) -> str:
    """Return the arguments of the function for an action, as JSON."""
    return msgspec.json.encode(action).decode()


def action_of(arguments: str) -> dict[str, Any] | None:
    """Return the action that a call's arguments mean; None if they are not a command."""
    try:
        found = _DECODER.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return {
        "type": "exec",
        "command": found.command,
        "env": found.env or {},
        "timeout_ms": found.timeout_ms,
        "user": found.user,
        "working_directory": found.working_directory,
    }
