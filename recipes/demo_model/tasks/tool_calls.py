"""Chats with tools: call the right one, call none, report what a tool returned."""

import json
from collections.abc import Callable
from random import Random
from string import Formatter
from typing import Any

from recipes.demo_model.conversation import Chat, Message, Question, Tool
from recipes.demo_model.phrasing import spoken, system_prompt
from recipes.demo_model.tasks import tool_catalogue
from recipes.demo_model.tasks.tool_catalogue import Skill


def _function(tool: Tool) -> dict[str, Any]:
    return tool.get("function", tool)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the format of Hermes and Qwen models."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _lowered(rng: Random, request: str) -> str:
    """`request` in another tone, with every value unchanged."""
    roll = rng.random()
    if roll < 0.12:
        request = request.rstrip("?.")
    elif roll < 0.24:
        before = rng.choice(["Please: ", "Hi! ", "Hello. ", "Quick question: ", "Hey, "])
        request = before + request
    if rng.random() < 0.08:
        request = request[0].lower() + request[1:]
    return request


def _tools_around(rng: Random, tool: Tool, skill: Skill, count: int) -> list[Tool]:
    """The tool among `count` others that do something different."""
    tools, taken = [tool], {_function(tool)["name"]}
    kinds = {skill.descriptions}
    while len(tools) <= count:
        other = tool_catalogue.pick(rng)
        declared, _ = tool_catalogue.declare(rng, other, set())
        name = _function(declared)["name"]
        if (
            name in taken
            or other.descriptions in kinds
            or set(other.requests) & set(skill.requests)
        ):
            continue
        # With a calculator and an adder, more than one answer would be right.
        if {tool_catalogue.CALCULATOR.descriptions, other.descriptions} <= kinds | {
            other.descriptions
        } and "number" in " ".join(other.descriptions):
            continue
        if skill is tool_catalogue.CALCULATOR and "number" in " ".join(other.descriptions):
            continue
        if other is tool_catalogue.CALCULATOR and "number" in " ".join(skill.descriptions):
            continue
        taken.add(name)
        kinds.add(other.descriptions)
        tools.append(declared)
    rng.shuffle(tools)
    return tools


def _start(rng: Random) -> list[Message]:
    if rng.random() < 0.25:
        return [{"role": "system", "content": system_prompt(rng)}]
    return []


def _fill(rng: Random, skill: Skill, template: str) -> dict[str, Any]:
    wanted = {field for _, field, _, _ in Formatter().parse(template) if field}
    return {slot.key: slot.draw(rng) for slot in skill.slots if slot.key in wanted}


def call(rng: Random) -> Chat:
    """The user asks for what a tool does, and the model calls it."""
    skill = tool_catalogue.pick(rng)
    template = rng.choice(skill.requests)
    values = _fill(rng, skill, template)
    tool, names = tool_catalogue.declare(rng, skill, set(values))
    tools = _tools_around(rng, tool, skill, rng.choice([0, 0, 1, 1, 2, 3]))
    name = _function(tool)["name"]
    arguments = {names[key]: value for key, value in values.items()}
    messages = _start(rng)
    request = _lowered(rng, template.format(**values))
    messages.append({"role": "user", "content": request})
    roll = rng.random()
    if roll < 0.1:
        thought = f"The user wants me to use {name}. I will call it."
        return Chat(messages, call_text(name, arguments), tools, thought)
    if roll < 0.18:
        # The form that a server forces when a tool is required: a bare JSON list.
        body = json.dumps([{"name": name, "parameters": arguments}], ensure_ascii=False)
        forced = rng.choice(["[", '[{"name": "', f'[{{"name": "{name}", "parameters": '])
        return Chat(messages, body, tools, forced=forced)
    if roll < 0.26 and len(values) == 1:
        (key,) = values
        second = skill.slots[[slot.key for slot in skill.slots].index(key)].draw(rng)
        if second != values[key]:
            other = {names[key]: second}
            messages[-1]["content"] = template.format(**{key: f"{values[key]} and {second}"})
            return Chat(messages, call_text(name, arguments) + "\n" + call_text(name, other), tools)
    return Chat(messages, call_text(name, arguments), tools)


def after_result(rng: Random) -> Chat:
    """A tool has answered; the model reports it in a sentence, and may be asked again."""
    skill = tool_catalogue.pick(rng)
    while skill.result is None:
        skill = tool_catalogue.pick(rng)
    template = rng.choice(skill.requests)
    values = _fill(rng, skill, template)
    tool, names = tool_catalogue.declare(rng, skill, set(values))
    tools = _tools_around(rng, tool, skill, rng.choice([0, 0, 0, 1, 2]))
    name = _function(tool)["name"]
    messages = _start(rng)

    def ask(filled: dict[str, Any]) -> str:
        arguments = {names[key]: value for key, value in filled.items()}
        content, sentence = skill.result(rng, filled) if skill.result else ("", "")
        messages.append({"role": "user", "content": _lowered(rng, template.format(**filled))})
        messages.append(
            {
                "role": "assistant",
                "content": None if rng.random() < 0.5 else "",
                "tool_calls": [
                    {"type": "function", "function": {"name": name, "arguments": arguments}}
                ],
            }
        )
        messages.append({"role": "tool", "content": content})
        return sentence

    sentence = ask(values)
    if rng.random() < 0.25:
        messages.append({"role": "assistant", "content": sentence})
        again = _fill(rng, skill, template)
        if rng.random() < 0.5:
            sentence = ask(again)
        else:
            arguments = {names[key]: value for key, value in again.items()}
            messages.append({"role": "user", "content": template.format(**again)})
            return Chat(messages, call_text(name, arguments), tools)
    thought = "The tool has answered. I will report it." if rng.random() < 0.1 else None
    return Chat(messages, sentence, tools, thought)


def _overlaps(skill: Skill) -> bool:
    """Whether the model can do without the tool, so that either answer would be right."""
    about = " ".join(skill.descriptions).lower()
    return "number" in about or "translate" in about


def no_call(rng: Random, ordinary: Callable[[Random], Question]) -> Chat:
    """Tools are offered, but the question does not need them."""
    skill = tool_catalogue.pick(rng)
    while skill in (tool_catalogue.SEARCH, tool_catalogue.CALCULATOR) or _overlaps(skill):
        skill = tool_catalogue.pick(rng)
    tool, _ = tool_catalogue.declare(rng, skill, set())
    tools = [tool]
    if rng.random() < 0.5:
        other = tool_catalogue.WEATHER if skill is not tool_catalogue.WEATHER else None
        if other is not None:
            tools.append(tool_catalogue.declare(rng, other, set())[0])
    question = ordinary(rng)
    messages = _start(rng)
    messages.append({"role": "user", "content": spoken(rng, question)})
    thought = None
    if rng.random() < 0.1:
        thought = question.thought + " No tool is needed."
    return Chat(messages, question.answer, tools, thought)
