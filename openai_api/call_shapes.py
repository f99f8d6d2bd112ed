"""Converts earlier calls to the other shapes that some chat templates expect.

Some templates read arguments only as an object, some only as text, and some accept only one call
per message. Every template must be able to render the calls that a model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from openai_api.call_arguments import arguments_text

Message = dict[str, Any]

# Key under which arguments that are not an object are put into one.
_WHOLE = "arguments"


def call_shapes(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages as they are, then with their calls in each shape a template may expect."""
    yield messages
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if any(not _is_object(call) for call in calls):
        yield _with_arguments(messages, _as_object)
    if any(map(_is_object, calls)):
        yield _with_arguments(messages, _as_text)
    if any(len(message.get("tool_calls") or ()) > 1 for message in messages):
        yield _one_call_each(messages)


def _is_object(call: Message) -> bool:
    return isinstance(call["function"]["arguments"], dict)


def _as_object(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {_WHOLE: arguments}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else arguments_text(arguments)


def _with_arguments(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    return [
        {**message, "tool_calls": [_changed(call, change) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _changed(call: Message, change: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Put each call into a message of its own, followed by the call's result."""
    found: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls") or ()
        place += 1
        if len(calls) < 2:
            found.append(message)
            continue
        returned = []
        while place < len(messages) and messages[place]["role"] == "tool":
            returned.append(messages[place])
            place += 1
        for index, call in enumerate(calls):
            said = message if index == 0 else {"role": message["role"], "content": ""}
            answer = _answer_of(call, returned)
            found += [{**said, "tool_calls": [call]}, *([answer] if answer else [])]
        found += returned
    return found


def _answer_of(call: Message, returned: list[Message]) -> Message | None:
    """Remove a call's result from `returned` and return it; None if there is none."""
    for index, answer in enumerate(returned):
        if answer.get("tool_call_id") == call.get("id"):
            return returned.pop(index)
    return None
