"""Converts the tools of a Responses request to chat's functions, and their names back in calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from openai_api.custom_tools import custom_function
from openai_api.responses import local_shell
from openai_api.schemas.chat import AllowedTools, CustomGrammar, NamedFunction, NamedToolChoice
from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert

# Stands between a namespace and a function's name in the function's name in chat.
_JOINT = "__"
# Types of tools that OpenAI's servers run. Here the model cannot call them.
_HOSTED = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "tool_search"),
        *("image_generation", "mcp", "computer", "computer_use_preview"),
        *("shell", "apply_patch", "programmatic_tool_calling"),
    }
)


@dataclass(frozen=True)
class Origin:
    """The client's tool that a function in chat stands for.

    Attributes:
        name: the client's name of the tool.
        namespace: the client's namespace of the tool; None if it has none.
        is_custom: whether the tool takes plain text, which is the function's argument `input`.
        is_command: whether the tool is the shell of the client's machine.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_command: bool = False


@dataclass
class OfferedTools:
    """The tools of a request that the model may call, as functions of chat.

    Attributes:
        functions: the functions, in the format of a chat request.
        origins: the client's tools, by the function's name in chat.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    @classmethod
    def read(cls, tools: list[Any]) -> OfferedTools:
        """Convert the tools; tools that OpenAI's servers run are left out.

        Raises:
            InvalidRequest: a tool has an unknown type or no name.
        """
        offered = cls()
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            if isinstance(tool, dict) and tool.get("type") == "namespace":
                for at, inner in enumerate(_inner(tool, where)):
                    offered._add(inner, f"{where}.tools[{at}]", _name(tool, where))
            else:
                offered._add(tool, where, None)
        return offered

    def name_in_chat(self, name: str, namespace: str | None) -> str:
        """Return the name in chat of the client's function `name` in `namespace`."""
        return f"{namespace}{_JOINT}{name}" if namespace else name

    def choice(self, choice: str | dict[str, Any] | None) -> str | NamedToolChoice | None:
        """Convert the `tool_choice` of a Responses request to that of a chat request.

        `None`, an absent choice, stays `None`.

        Raises:
            InvalidRequest: `tool_choice` is malformed, or allows a tool that is not offered.
        """
        if choice is None or isinstance(choice, str):
            return choice
        match choice.get("type"):
            case "function" | "custom":
                name = self.name_in_chat(_name(choice, "tool_choice"), choice.get("namespace"))
                return NamedToolChoice(type="function", function=NamedFunction(name=name))
            case "allowed_tools":
                return self._allowed(choice)
            case other:
                raise InvalidRequest(
                    "tool_choice.type must be function, custom or allowed_tools, got "
                    f"{str(other)[:64]!r}.",
                    param="tool_choice",
                )

    def _allowed(self, choice: dict[str, Any]) -> str | NamedToolChoice:
        allowed, mode = choice.get("tools"), choice.get("mode", "auto")
        if not isinstance(allowed, list) or not all(isinstance(each, dict) for each in allowed):
            raise InvalidRequest("tool_choice.tools must be a list of tools.", param="tool_choice")
        if mode not in ("auto", "required"):
            raise InvalidRequest("tool_choice.mode must be auto or required.", param="tool_choice")
        names: list[str] = []
        for index, each in enumerate(allowed):
            name = self.name_in_chat(str(each.get("name", each.get("type"))), each.get("namespace"))
            if name in self.origins:
                names.append(name)
            elif each.get("type") not in _HOSTED:
                raise InvalidRequest(
                    f"tool_choice.tools[{index}] is not among the tools.", param="tool_choice"
                )
        if not names and (mode == "required" or not allowed):
            raise InvalidRequest(
                "tool_choice.tools has no tool that can be called here.", param="tool_choice"
            )
        if not names:
            # The allowed tools are all tools of OpenAI's servers, so the model can call none.
            return "none"
        tools: list[dict[str, Any]] = [{"function": {"name": name}} for name in names]
        return NamedToolChoice(
            type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=tools)
        )

    def _add(self, tool: Any, where: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in _HOSTED and namespace is None:
            return
        if kind == local_shell.NAME and namespace is None:
            self.functions.append({"type": "function", "function": local_shell.FUNCTION})
            self.origins[local_shell.NAME] = Origin(local_shell.NAME, is_command=True)
            return
        if kind not in ("function", "custom"):
            raise InvalidRequest(
                f"{where}.type must be function, custom or namespace, got {str(kind)[:64]!r}.",
                param=f"{where}.type",
            )
        name = _name(tool, where)
        origin = Origin(name, namespace, is_custom=kind == "custom")
        in_chat = self.name_in_chat(name, namespace)
        function = (
            _custom(tool, in_chat, where)
            if origin.is_custom
            else dict(_function(tool), name=in_chat)
        )
        self.functions.append({"type": "function", "function": function})
        self.origins[in_chat] = origin


def _inner(space: dict[str, Any], where: str) -> list[Any]:
    tools = space.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequest(f"{where}.tools must be a list of tools.", param=f"{where}.tools")
    return tools


def _name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where} must have a name.", param=where)
    return name


def _function(tool: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("description", "parameters", "strict"):
        if tool.get(key) is not None:
            yield key, tool[key]


def _custom(tool: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    form, description, grammar = tool.get("format"), tool.get("description"), None
    if isinstance(form, dict) and form.get("type") == "grammar":
        try:
            grammar = convert(form, CustomGrammar)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}.format: {error}", param=f"{where}.format") from None
    return custom_function(name, None if description is None else str(description), grammar)
