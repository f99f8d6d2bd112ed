"""Converts all forms of tools in a chat request to functions, and calls back to the sent form.

The rest of the code knows only functions in `tools`. The other forms are `functions` and
`function_call`, the predecessors of tools; tools of type `custom`; and a `tool_choice` of type
`allowed_tools`. They are converted in the request, and converted back in the answer's deltas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from openai_api.call_arguments import told_text
from openai_api.custom_tools import arguments_of, custom_function, text_of
from openai_api.schemas.chat import (
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    CustomSpec,
    FunctionCall,
    NamedFunction,
    NamedToolChoice,
    ToolCall,
)
from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert

Delta = dict[str, Any]


@dataclass(frozen=True)
class CallForms:
    """In which form an answer reports calls.

    Attributes:
        customs: names of the custom tools, whose input is text instead of JSON arguments.
        is_old: whether the request used `functions`. The answer then has at most one call, in the
            older field `function_call`.
    """

    customs: frozenset[str] = frozenset()
    is_old: bool = False

    def writer(self) -> CallWriter | None:
        """Return the converter of one choice's deltas; None if deltas need no conversion."""
        return CallWriter(self) if self.customs or self.is_old else None


def settle_tools(request: ChatCompletionRequest) -> CallForms:
    """Convert the request's tools and earlier calls to functions; return their original forms.

    Raises:
        InvalidRequest: a form is malformed, or two forms exclude each other.
    """
    for index, message in enumerate(request.messages):
        _settle_message(message, f"messages[{index}]")
    is_old = request.functions is not None or request.function_call is not None
    if is_old:
        _replace_functions(request)
    customs = _replace_customs(request)
    if isinstance(request.tool_choice, NamedToolChoice):
        request.tool_choice = _settled_choice(request, request.tool_choice)
    return CallForms(customs, is_old)


def _settle_message(message: ChatMessage, where: str) -> None:
    if message.role.lower() == "function":
        # Current templates render the role `tool`, and silently drop unknown roles.
        message.role = "tool"
    if message.function_call is not None:
        call = ToolCall(type="function", function=message.function_call)
        message.tool_calls = [*(message.tool_calls or ()), call]
        message.function_call = None
    for index, call in enumerate(message.tool_calls or ()):
        if call.function is None and call.custom is not None:
            arguments = arguments_of(told_text(call.custom.input))
            call.function = FunctionCall(name=call.custom.name, arguments=dict(arguments))
            call.type, call.custom = "function", None
        if call.function is None:
            place = f"{where}.tool_calls[{index}]"
            raise InvalidRequest(f"{place} must have function or custom.", param=place)


def _replace_functions(request: ChatCompletionRequest) -> None:
    if request.tools is not None or request.tool_choice is not None:
        raise InvalidRequest(
            "functions and function_call cannot be combined with tools and tool_choice, which "
            "replaced them.",
            param="functions" if request.functions is not None else "function_call",
        )
    if not request.functions:
        raise InvalidRequest("function_call needs functions.", param="function_call")
    choice = request.function_call
    if isinstance(choice, str) and choice not in ("none", "auto"):
        raise InvalidRequest(
            "function_call must be none, auto or an object with a function's name.",
            param="function_call",
        )
    request.tools = [{"type": "function", "function": each} for each in request.functions]
    request.tool_choice = (
        NamedToolChoice(type="function", function=choice)
        if isinstance(choice, NamedFunction)
        else choice
    )
    # The answer's `function_call` has room for one call.
    request.parallel_tool_calls = False
    request.functions = request.function_call = None


def _replace_customs(request: ChatCompletionRequest) -> frozenset[str]:
    if not request.tools:
        return frozenset()
    names: set[str] = set()
    tools = request.tools
    for index, tool in enumerate(tools):
        if tool.get("type") != "custom":
            continue
        custom = _custom_of(tool, f"tools[{index}].custom")
        form = custom.format
        grammar = None if form is None else form.grammar
        function = custom_function(custom.name, custom.description, grammar)
        tools[index] = {"type": "function", "function": function}
        names.add(custom.name)
    return frozenset(names)


def _custom_of(tool: dict[str, Any], where: str) -> CustomSpec:
    try:
        return convert(tool.get("custom"), CustomSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None


def _settled_choice(request: ChatCompletionRequest, choice: NamedToolChoice) -> NamedToolChoice:
    match choice.type:
        case "function" if choice.function is not None:
            return NamedToolChoice(type="function", function=choice.function)
        case "custom" if choice.custom is not None:
            return NamedToolChoice(type="function", function=choice.custom)
        case "allowed_tools" if choice.allowed_tools is not None:
            return _settled_allowed(request, choice.allowed_tools)
    raise InvalidRequest(
        "tool_choice as an object has type function, custom or allowed_tools, and a key of that "
        f"name; got type {choice.type[:64]!r}.",
        param="tool_choice",
    )


def _settled_allowed(request: ChatCompletionRequest, allowed: AllowedTools) -> NamedToolChoice:
    offered = {_name_of(tool): tool for tool in request.tools or ()}
    names = [_name_of(tool) for tool in allowed.tools]
    for index, name in enumerate(names):
        if name is None or name not in offered:
            raise InvalidRequest(
                f"tool_choice.allowed_tools.tools[{index}] is not among the tools.",
                param="tool_choice",
            )
    if not names:
        raise InvalidRequest("tool_choice.allowed_tools has no tools.", param="tool_choice")
    # The prompt still shows all tools, so that it matches the prefix cache on every turn.
    tools = [tool for name, tool in offered.items() if name in names]
    return NamedToolChoice(
        type="allowed_tools", allowed_tools=AllowedTools(mode=allowed.mode, tools=tools)
    )


def _name_of(tool: dict[str, Any]) -> str | None:
    described = tool.get("function", tool.get("custom"))
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) else None


@dataclass
class CallWriter:
    """Rewrites the calls in one choice's deltas to the form of the request's tools."""

    forms: CallForms
    _open: dict[str, Any] | None = None
    _arguments: list[str] = field(default_factory=list)

    def rewritten(self, deltas: list[Delta], *, over: bool) -> list[Delta]:
        """Return the deltas with calls in the form of the request's tools.

        Args:
            deltas: deltas whose calls are function calls.
            over: whether these are the last deltas.
        """
        found: list[Delta] = []
        for delta in deltas:
            found += self._delta(delta) if "tool_calls" in delta else [delta]
        return found + self._close() if over else found

    def _delta(self, delta: Delta) -> list[Delta]:
        (part,) = delta["tool_calls"]
        if self.forms.is_old:
            call = {key: value for key, value in part["function"].items() if value is not None}
            return [_with(delta, function_call=call)]
        found: list[Delta] = []
        if part.get("id") is not None:
            found = self._close()
            if part["function"]["name"] in self.forms.customs:
                self._open = delta
        if self._open is None:
            return [*found, delta]
        # A custom tool's input is sent at once, because it is only known when the JSON is complete.
        self._arguments.append(part["function"]["arguments"])
        return found

    def _close(self) -> list[Delta]:
        if self._open is None:
            return []
        delta, self._open = self._open, None
        arguments, self._arguments = "".join(self._arguments), []
        (part,) = delta["tool_calls"]
        custom = {"name": part["function"]["name"], "input": text_of(arguments)}
        call = {"index": part["index"], "id": part["id"], "type": "custom", "custom": custom}
        return [_with(delta, tool_calls=[call])]


def _with(delta: Delta, **call: Any) -> Delta:
    return {**{key: value for key, value in delta.items() if key != "tool_calls"}, **call}
