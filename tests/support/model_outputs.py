"""Model outputs with tool calls and reasoning, as each family writes them, and parsed results.

Arguments are compared as objects, because a model may format JSON in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "hourly": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filter": {"$ref": "#/$defs/filter"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": "number"},
        },
        "$defs": {"filter": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}

CODE = 'def f(x):\n\treturn {"a": "b\\n"} if x < 3 else "</done>"\n\n\nprint(f(1))  # ü😀'
WEATHER = {"city": "Zürich 😀", "days": 3, "hourly": True}
FILE = {"path": "a b.py", "content": CODE}
SEARCH = {
    "query": 'say "hi" \\ {brace] </tool_call',
    "filter": {"year": {"from": 1999, "to": None}, "langs": [["de", "fr"], []]},
    "tags": ["a,b", "}{", "ß"],
    "limit": -2.5e-3,
}


def dumps(value: Any, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **how)


@dataclass(frozen=True)
class Recorded:
    """An output of a model, and the expected result of parsing it.

    Attributes:
        content: text around the tool calls, without whitespace at its ends.
    """

    text: str
    calls: Calls = field(default_factory=list)
    content: str = ""
    reasoning: str = ""


def _hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'


def _llama(name: str, arguments: Any) -> str:
    return dumps({"name": name, "parameters": arguments})


def _v3(name: str, arguments: Any) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n"
        "```<｜tool▁call▁end｜>"
    )


def _v31(name: str, arguments: Any) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"


def _deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>"


def _kimi(name: str, index: int, arguments: Any) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{dumps(arguments)}<|tool_call_end|>"
    )


def _kimi_section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _coder(name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any], line: str = "\n") -> str:
    inside = "".join(
        f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{_plain(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{inside}{line}</tool_call>"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{inside}</invoke>\n'


def _minimax(*invokes: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _harmony(name: str, arguments: Any) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{dumps(arguments)}<|call|>"
    )


def _lines(write: Callable[[str, Any], str], between: str = "\n") -> Callable[[Calls], str]:
    return lambda calls: between.join(write(*each) for each in calls)


# For each family, how it writes several tool calls as its whole output.
CALL_WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _lines(_hermes),
    "llama3": _lines(_llama, "; "),
    "mistral": _lines(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}", ""),
    "deepseekv3": lambda calls: _deepseek(*(_v3(*each) for each in calls)),
    "deepseekv31": lambda calls: _deepseek(_lines(_v31, "")(calls)),
    "kimi_k2": lambda calls: _kimi_section(*(_kimi(n, i, x) for i, (n, x) in enumerate(calls))),
    "qwen3_coder": _lines(_coder),
    "glm45": _lines(_glm),
    "minimax-m2": lambda calls: _minimax(*(_invoke(*each) for each in calls)),
    "gpt-oss": _lines(_harmony, "<|start|>assistant"),
    "pythonic": lambda calls: f"[{_lines(_python, ', ')(calls)}]",
}

_THREE: Calls = [("get_weather", WEATHER), ("write_file", FILE), ("search", SEARCH)]
_NOW: Calls = [("now", {})]
# Values that are written in tags cannot contain these tags.
_QUERY = {**SEARCH, "query": 'say "hi" \\ {brace] <tag'}
_TAGGED: Calls = [
    ("get_weather", WEATHER),
    ("write_file", {**FILE, "mode": 420}),
    ("search", _QUERY),
]
_TEXT = "Ich sehe nach … <b>a & b</b> {not: json}"

TOOL_OUTPUTS: dict[str, list[Recorded]] = {
    "hermes": [
        Recorded(_hermes("get_weather", WEATHER), _THREE[:1]),
        Recorded(f"{_TEXT}\n" + "\n".join(_hermes(*each) for each in _THREE), _THREE, _TEXT),
        Recorded('<tool_call>{"name":"now"}</tool_call>\nDone.', _NOW, "Done."),
        Recorded('<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>', _NOW),
        Recorded('<tool_call>\n{"name": "now", "arguments": "{}"}\n</tool_call>', _NOW),
        # Outputs without a closing brace or tag.
        Recorded('<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>', _NOW),
        Recorded('<tool_call>\n{"name": "now", "arguments": {}}', _NOW),
    ],
    "llama3": [
        Recorded(_llama("get_weather", WEATHER), _THREE[:1]),
        Recorded("<|python_tag|>" + "; ".join(_llama(*each) for each in _THREE), _THREE),
        Recorded('{\n  "name": "now",\n  "arguments": {}\n}', _NOW),
        Recorded(f"{_TEXT}<|python_tag|>{_llama('search', SEARCH)}", _THREE[2:], _TEXT),
        Recorded('{"type": "function", "name": "now", "parameters": {}}', _NOW),
        Recorded('{"answer": 42}', [], '{"answer": 42}'),
    ],
    "mistral": [
        Recorded(
            f"[TOOL_CALLS] {dumps([{'name': name, 'arguments': given} for name, given in _THREE])}",
            _THREE,
        ),
        Recorded(
            "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in _THREE), _THREE
        ),
        Recorded(f"{_TEXT}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{{}}", _NOW, _TEXT),
        Recorded('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "123456789"}]', _NOW),
        Recorded('[TOOL_CALLS]get_weather{"city": "Nice"}', [("get_weather", {"city": "Nice"})]),
    ],
    "deepseekv3": [
        Recorded(_deepseek(_v3("get_weather", WEATHER)), _THREE[:1]),
        Recorded(_TEXT + _deepseek(*(_v3(*each) for each in _THREE)), _THREE, _TEXT),
        Recorded(_deepseek(_v3("now", {})) + "\n", _NOW),
    ],
    "deepseekv31": [
        Recorded(_deepseek(_v31("get_weather", WEATHER)), _THREE[:1]),
        Recorded(_TEXT + _deepseek(*(_v31(*each) for each in _THREE)), _THREE, _TEXT),
        Recorded(_deepseek(_v31("now", {})) + "\n", _NOW),
    ],
    "kimi_k2": [
        Recorded(_kimi_section(_kimi("get_weather", 0, WEATHER)), _THREE[:1]),
        Recorded(
            _TEXT + _kimi_section(*(_kimi(name, i, x) for i, (name, x) in enumerate(_THREE))),
            _THREE,
            _TEXT,
        ),
        Recorded(
            "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.now:7"
            "<|tool_call_argument_begin|>\n{}\n<|tool_call_end|>\n<|tool_calls_section_end|>\n",
            _NOW,
        ),
    ],
    "qwen3_coder": [
        Recorded(_coder("get_weather", WEATHER), _TAGGED[:1]),
        Recorded(f"{_TEXT}\n\n" + "\n".join(_coder(*each) for each in _TAGGED), _TAGGED, _TEXT),
        Recorded(_coder("now", {}), _NOW),
        # An output without the outer tags.
        Recorded(
            "<function=write_file>\n<parameter=mode>\nnull\n</parameter>\n</function>",
            [("write_file", {"mode": None})],
        ),
    ],
    "glm45": [
        Recorded(_glm("get_weather", WEATHER), _TAGGED[:1]),
        Recorded(f"{_TEXT}\n" + "\n".join(_glm(*each) for each in _TAGGED), _TAGGED, _TEXT),
        Recorded("".join(_glm(name, given, "") for name, given in _TAGGED), _TAGGED),
        Recorded("<tool_call>now</tool_call>", _NOW),
    ],
    "minimax-m2": [
        Recorded(_minimax(_invoke("get_weather", WEATHER)), _TAGGED[:1]),
        Recorded(f"{_TEXT}\n" + _minimax(*(_invoke(*each) for each in _TAGGED)), _TAGGED, _TEXT),
        Recorded(_minimax(_invoke("now", {})) + "\n", _NOW),
    ],
    "gpt-oss": [
        Recorded(_harmony("get_weather", WEATHER), _THREE[:1]),
        Recorded(
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
            "<|start|>assistant" + _harmony("search", SEARCH),
            [*_NOW, *_THREE[2:]],
        ),
        # A message to the user comes first. Its header is not that of a tool call.
        Recorded(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            + _harmony("search", SEARCH),
            _THREE[2:],
            "<|channel|>commentary<|message|>I look.<|end|>",
        ),
    ],
    "pythonic": [
        Recorded(f"[{_python('get_weather', WEATHER)}]", _THREE[:1]),
        Recorded(f"[{', '.join(_python(*each) for each in _THREE)}]", _THREE),
        Recorded("<|python_start|>[now()]<|python_end|>", _NOW),
        Recorded(
            '[get_weather(city="it\'s", days=-1, hourly=true)]\nDone.',
            [("get_weather", {"city": "it's", "days": -1, "hourly": True})],
            "Done.",
        ),
        Recorded("[1, 2] is a list", [], "[1, 2] is a list"),
    ],
}

_THOUGHTS = 'Hm, "x" < 3 …\n\n<b>then</b> {"name": 1} 😀'
_ANSWER = "Also: a < b.\n\nß"


def _tags(begin: str, end: str) -> list[Recorded]:
    return [
        Recorded(f"{begin}\n{_THOUGHTS}\n{end}\n\n{_ANSWER}", [], _ANSWER, _THOUGHTS),
        Recorded(f"{begin}{_THOUGHTS}{end}{_ANSWER}", [], _ANSWER, _THOUGHTS),
        Recorded(f"{begin}{_THOUGHTS}", [], "", _THOUGHTS),
    ]


_THINK = _tags("<think>", "</think>")
_SKIPPED = [
    Recorded(_ANSWER, [], _ANSWER),
    Recorded(f"<think>\n\n</think>\n{_ANSWER}", [], _ANSWER),
]
_ALWAYS = [*_THINK, Recorded(f"{_THOUGHTS}</think>{_ANSWER}", [], _ANSWER, _THOUGHTS)]
_APPENDED = f"<think>{_THOUGHTS}</think>{_ANSWER}"

REASONING_OUTPUTS: dict[str, list[Recorded]] = {
    **dict.fromkeys(("qwen3", "glm45", "deepseek-v3", "interns1", "nano_v3"), _THINK + _SKIPPED),
    **dict.fromkeys(("qwen3-thinking", "deepseek-r1", "step3", "step3p5", "minimax"), _ALWAYS),
    "minimax-append-think": [Recorded(f"{_THOUGHTS}</think>{_ANSWER}", [], _APPENDED)],
    "kimi": _tags("◁think▷", "◁/think▷") + _SKIPPED[:1],
    "kimi_k2": [
        *_THINK,
        *_SKIPPED,
        Recorded(
            f"<think>{_THOUGHTS}<|tool_calls_section_begin|>x",
            [],
            "<|tool_calls_section_begin|>x",
            _THOUGHTS,
        ),
    ],
    "gpt-oss": [
        Recorded(
            f"<|channel|>analysis<|message|>{_THOUGHTS}<|end|><|start|>assistant<|channel|>final"
            f"<|message|>{_ANSWER}<|return|>",
            [],
            _ANSWER,
            _THOUGHTS,
        ),
        Recorded(f"<|channel|>analysis<|message|>{_THOUGHTS}", [], "", _THOUGHTS),
        Recorded(f"<|channel|>final<|message|>{_ANSWER}", [], _ANSWER),
        Recorded(
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Done.",
            [],
            "I look.Done.",
            "One.Two.",
        ),
    ],
}

# Outputs with reasoning, a tool call and text, by the two parsers that read them.
BOTH: dict[tuple[str, str], Recorded] = {
    ("qwen3", "hermes"): Recorded(
        f"<think>\n{_THOUGHTS}\n</think>\n\n{_ANSWER}\n{_hermes('search', SEARCH)}",
        _THREE[2:],
        _ANSWER,
        _THOUGHTS,
    ),
    ("qwen3", "qwen3_coder"): Recorded(
        f"<think>\n{_THOUGHTS}\n</think>\n\n{_ANSWER}\n{_coder('search', _QUERY)}",
        _TAGGED[2:],
        _ANSWER,
        _THOUGHTS,
    ),
    ("glm45", "glm45"): Recorded(
        f"\n<think>{_THOUGHTS}</think>\n{_ANSWER}\n{_glm('search', _QUERY)}",
        _TAGGED[2:],
        _ANSWER,
        _THOUGHTS,
    ),
    ("deepseek-r1", "deepseekv3"): Recorded(
        f"{_THOUGHTS}\n</think>\n\n{_ANSWER}{_deepseek(_v3('search', SEARCH))}",
        _THREE[2:],
        _ANSWER,
        _THOUGHTS,
    ),
    ("kimi_k2", "kimi_k2"): Recorded(
        f"<think>{_THOUGHTS}{_kimi_section(_kimi('search', 0, SEARCH))}",
        _THREE[2:],
        "",
        _THOUGHTS,
    ),
    ("minimax", "minimax-m2"): Recorded(
        f"{_THOUGHTS}\n</think>\n\n{_ANSWER}\n{_minimax(_invoke('search', _QUERY))}",
        _TAGGED[2:],
        _ANSWER,
        _THOUGHTS,
    ),
    ("gpt-oss", "gpt-oss"): Recorded(
        f"<|channel|>analysis<|message|>{_THOUGHTS}<|end|><|start|>assistant"
        f"<|channel|>commentary<|message|>{_ANSWER}<|end|><|start|>assistant"
        + _harmony("search", SEARCH),
        _THREE[2:],
        _ANSWER,
        _THOUGHTS,
    ),
}
