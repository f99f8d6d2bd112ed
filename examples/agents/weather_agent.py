"""An agent that calls a weather tool: by chat, Responses and Anthropic's Messages.

make serve
python examples/agents/weather_agent.py [--url URL] [--api chat|responses|messages] [--stream]

It needs the packages `openai` and `anthropic`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai

QUESTION = "What is the weather in Paris?"
NAME, DESCRIPTION = "get_weather", "Get the current weather of a city"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
MAX_TURNS = 4


def get_weather(city: str) -> str:
    """Return the weather, in place of a real service."""
    return json.dumps({"city": city, "temperature": 18, "unit": "celsius", "condition": "sunny"})


def by_chat(url: str, *, stream: bool) -> str:
    """`/v1/chat/completions`: calls are part of a message, results are messages of the tool."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_TURNS):
        asked: dict[str, Any] = {
            "model": "default",
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
            "temperature": 0,
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise RuntimeError("The model does not stop calling tools.")


def by_responses(url: str, *, stream: bool) -> str:
    """`/v1/responses`: the conversation is a list of items, and each request sends all items."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    tool = {
        "type": "function",
        "name": NAME,
        "description": DESCRIPTION,
        "parameters": PARAMETERS,
        "strict": False,
    }
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_TURNS):
        asked: dict[str, Any] = {
            "model": "default",
            "input": items,
            "tools": [tool],
            "store": False,
            "temperature": 0,
        }
        if stream:
            with client.responses.stream(**asked) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        for call in calls:
            result = get_weather(**json.loads(call.arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    raise RuntimeError("The model does not stop calling tools.")


def by_messages(url: str, *, stream: bool) -> str:
    """`/v1/messages`: calls are blocks, and results are blocks of the user."""
    client = anthropic.Anthropic(base_url=url, api_key="none")
    tool = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(MAX_TURNS):
        asked: dict[str, Any] = {
            "model": "default",
            "max_tokens": 200,
            "messages": messages,
            "tools": [tool],
            "extra_body": {"temperature": 0},
        }
        if stream:
            with client.messages.stream(**asked) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": get_weather(**block.input),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    raise RuntimeError("The model does not stop calling tools.")


APIS: dict[str, Callable[..., str]] = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
}


def main() -> None:
    """Ask through one API, or through all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api", choices=APIS, help="default: all")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    for name in [options.api] if options.api else APIS:
        print(f"{name}: {APIS[name](options.url, stream=options.stream)}")


if __name__ == "__main__":
    main()
