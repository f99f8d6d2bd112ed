"""The script of a simulated coding agent: four tasks with six answers of the model each.

Most answers call tools. They are written in the Hermes format. The messages that an agent sends
back are in the agent's own module.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TASKS = (
    "The build fails since this morning. Find out why.",
    "Good. Now mend it, in the smallest way — and keep the Zwölf tests of `gate.py` as they are.",
    "Run the whole suite and tell me what is slow.",
    "Write down in NOTES.md what you have changed.",
)
SYSTEM = "\n".join(
    [
        "You work on a repository on the user's machine, together with the user.",
        *(f"Rule {number}: say what you are about to do, then do it." for number in range(40)),
    ]
)
REPOSITORY = "\n".join(f"- src/part_{number}.py holds part {number}." for number in range(20))


@dataclass(frozen=True)
class ToolUse:
    """A tool call of the script, described by its purpose; each agent has its own tools for it.

    Attributes:
        kind: `run` a command, `patch` a file, or `find` something.
        text: the command, the patch, or the pattern to find.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Answer:
    """An answer of the model: its thought, its text, and its tool calls."""

    thought: str
    text: str
    calls: tuple[ToolUse, ...] = ()


def answers() -> list[list[Answer]]:
    """Return the answers to each task; the last answer of a task calls no tool."""
    found = []
    for task in range(len(TASKS)):
        number = f"{task + 1}"
        found.append(
            [
                Answer(f"Where to begin with {number}?", "", (ToolUse("run", f"ls -la {number}"),)),
                Answer(
                    "Two things can be read at once.",
                    "I look at both files.",
                    (ToolUse("run", "cat gate.py"), ToolUse("find", f"wheel_{number}")),
                ),
                Answer("", "Now the change.", (ToolUse("patch", f"+ water = {number}\n"),)),
                Answer(
                    "It did not apply.\nOnce more.", "", (ToolUse("patch", f"+ mill {number}"),)
                ),
                Answer("", "", (ToolUse("run", "git status --short"),)),
                Answer(f"All of {number} is done.", f"Part {number} is done: größer, 速い, fine."),
            ]
        )
    return found


def result_of(use: ToolUse, turn: int) -> str:
    """Return the result of a tool call."""
    lines = [f"{use.kind} {turn}: {use.text.strip()}", "café 東京 <tag> {json: 1}"]
    return "\n".join([*lines, *(f"{line:3} | {use.text.strip()[:20]}" for line in range(10))])


def written(answer: Answer, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the model's output for an answer; `calls` has the names and arguments of its tools."""
    text = f"<think>\n{answer.thought}\n</think>\n\n" if answer.thought else ""
    parts = [answer.text] if answer.text else []
    for name, arguments in calls:
        called = f'"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}'
        parts.append(f"<tool_call>\n{{{called}}}\n</tool_call>")
    return text + "\n".join(parts)
