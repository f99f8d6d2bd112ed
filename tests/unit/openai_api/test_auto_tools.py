"""`tool_choice` auto beside a grammar: which outputs a model may write, with each back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from openai_api.output_parser import Call, OutputParser, WholeCalls
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.requests.sampling_params import ThinkingSpec
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler

pytestmark = needs_grammars

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Quito"]}},
}
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}
AS_NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
ANSWER = '{"number": 7}'


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    schema = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **schema, **fields}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


STRICT = [tool("weather", CITY, strict=True), tool("now", CITY)]
GOOD = call("weather", '{"city": "Oslo"}')
BAD = call("weather", '{"city": "Rome"}')
LOOSE = call("now", '{"city": "Rome", "more": [1]}')


class Asked:
    """A request as it came to the scheduler."""

    def __init__(self, front: Any, compiler: InProcessCompiler, choice: dict[str, Any]) -> None:
        self.compiler = compiler
        self.request = front.engine.requests[-1]
        self.choice = choice

    @property
    def is_free(self) -> bool:
        return not self.request.grammar_key

    def takes(self, text: str) -> bool:
        return self.compiler.takes(self.request.grammar, text)


@pytest.fixture(params=BACKENDS)
def ask(request: pytest.FixtureRequest, make_front: Any, tmp_path: Path) -> Callable[..., Any]:
    """Ask a fresh front with the back end's compiler; options of the front begin with `front_`."""

    async def ask(reply: str = "Hi", *, refused: bool = False, **fields: Any) -> Any:
        made = {name[6:]: fields.pop(name) for name in list(fields) if name.startswith("front_")}
        front = make_front(lambda _: reply, **{"tools": "hermes", **made})
        compiler = InProcessCompiler(request.param, tmp_path, byte_tokenizer(), [EOS_ID])
        front.engine.client.grammars = compiler
        answer = await front.chat(**fields)
        if refused:
            assert answer.status_code == 400, answer.text
            return answer.json()["error"]
        assert answer.status_code == 200, answer.text
        return Asked(front, compiler, answer.json()["choices"][0])

    return ask


async def test_strict_holds_for_calls_and_lets_text_pass(ask: Any) -> None:
    asked = await ask(f"Well.\n{GOOD}", tools=STRICT)
    assert asked.choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
    }
    for text in ("Hello.", GOOD, f"Well.\n{GOOD}\n{LOOSE}\nDone.", ANSWER, "<think>x</think> a <"):
        assert asked.takes(text), text
    for text in (BAD, call("unknown", "{}"), f"{GOOD}\n{BAD}", "<tool_call>", GOOD[:-12]):
        assert not asked.takes(text), text


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("now", CITY)]},
        {"tools": [tool("now", CITY, strict=False)]},
        {"tools": STRICT, "tool_choice": "none"},
        {"tools": [tool("now", strict=True)]},
        # No grammar for calls: not refused.
        {"tools": STRICT, "front_tools": None},
        {"tools": [tool("now", {"type": "object", "not": {}}, strict=True)]},
        {"tools": [tool("now", {"const": 2**64 - 1, "not": {}}, strict=True)]},
    ],
)
async def test_free_outputs(ask: Any, fields: dict[str, Any]) -> None:
    assert (await ask(**fields)).is_free


@pytest.mark.parametrize("is_strict", [False, True])
async def test_calls_are_of_allowed_tools(ask: Any, is_strict: bool) -> None:
    tools = [tool("weather", CITY, strict=is_strict), tool("now"), tool("never", CITY, strict=True)]

    def allowed(mode: str) -> dict[str, Any]:
        named = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    never = call("never", '{"city": "Oslo"}')
    asked = await ask(tools=tools, tool_choice=allowed("auto"))
    for text in ("Hello.", GOOD, f"Well.\n{GOOD}\n{LOOSE}"):
        assert asked.takes(text), text
    assert asked.takes(BAD) != is_strict
    assert not asked.takes(never)
    asked = await ask(tools=tools, tool_choice=allowed("auto"), response_format=AS_NUMBER)
    assert asked.takes(ANSWER)
    assert asked.takes(GOOD)
    assert not asked.takes(never)
    asked = await ask(tools=tools, tool_choice=allowed("required"))
    for name, is_allowed in (("weather", True), ("never", False)):
        forced = f'[{{"name": "{name}", "parameters": {{"city": "Oslo"}}}}]'
        assert asked.takes(forced) == is_allowed
    assert not asked.takes("Hello.")


async def test_a_schema_that_cannot_be_followed_leaves_the_others_strict(ask: Any) -> None:
    hard = tool("hard", {"type": "object", "not": {}}, strict=True)
    asked = await ask(tools=[hard, *STRICT])
    assert asked.takes(call("hard", '{"a": 1}'))
    assert not asked.takes(BAD)


async def test_many_tools(ask: Any) -> None:
    many = [tool(f"tool{index}", CITY, strict=True) for index in range(80)]
    asked = await ask(tools=[*STRICT, *many])
    assert asked.takes(GOOD)
    assert not asked.takes(BAD)
    # More than a grammar may have: not refused either.
    long = {**CITY, "description": "x" * 256 * 1024}
    assert (await ask(tools=[*STRICT, tool("long", long, strict=True)])).is_free


async def test_what_fails_only_in_the_compiler_is_not_refused(ask: Any) -> None:
    never = {"type": "string", "minLength": 9, "maxLength": 3}
    schema = {"type": "object", "properties": {"a": never}, "required": ["a"]}
    tools = [tool("f", schema, strict=True)]
    asked = await ask(tools=tools)
    assert asked.is_free
    assert len(asked.compiler.specs) == 1
    asked = await ask(ANSWER, tools=tools, response_format=AS_NUMBER)
    assert asked.takes(call("f", "{}"))
    assert asked.takes(ANSWER)
    # Strict, not strict, and that again for the request.
    assert len(asked.compiler.specs) == 3


async def test_strict_without_a_compiler(make_front: Any) -> None:
    front = make_front(lambda _: GOOD, tools="hermes")
    for stream in (False, True):
        assert (await front.chat(tools=STRICT, stream=stream)).status_code == 200


async def test_an_answer_or_calls(ask: Any) -> None:
    asked = await ask(GOOD, tools=STRICT, response_format=AS_NUMBER)
    assert asked.choice["finish_reason"] == "tool_calls"
    for text in (ANSWER, GOOD, LOOSE, f"{GOOD}\n{LOOSE}"):
        assert asked.takes(text), text
    for text in ("Hello.", '{"number": "x"}', BAD, f"Well. {GOOD}", f"{GOOD}{ANSWER}", ""):
        assert not asked.takes(text), text
    asked = await ask(ANSWER, tools=STRICT, response_format={"type": "json_object"})
    assert asked.choice["message"]["content"] == ANSWER
    assert asked.takes('{"any": null}')
    assert asked.takes(GOOD)
    asked = await ask(ANSWER, tools=STRICT, response_format=AS_NUMBER, tool_choice="none")
    assert not asked.takes(GOOD)
    assert asked.takes(ANSWER)


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"regex": "yes|no"}, "no"),
        ({"ebnf": 'root ::= "a" item+\nitem ::= "b" | "c"'}, "abc"),
        ({"json_schema": orjson.dumps(NUMBER).decode()}, ANSWER),
    ],
)
async def test_other_constraints(ask: Any, fields: dict[str, Any], answer: str) -> None:
    asked = await ask(tools=STRICT, **fields)
    assert asked.takes(answer)
    assert asked.takes(GOOD)
    assert not asked.takes("maybe")


async def test_a_structural_tag_describes_everything(ask: Any) -> None:
    form = {"type": "const_string", "value": "so"}
    asked = await ask(tools=STRICT, response_format={"type": "structural_tag", "format": form})
    assert asked.takes("so")
    assert not asked.takes(GOOD)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"front_tools": None, "response_format": AS_NUMBER}, "response_format", "--tool-call-"),
        ({"front_tools": None, "regex": "a"}, "regex", "Set tool_choice to none"),
        ({"json_schema": "{"}, "json_schema", "not valid JSON"),
        ({"json_schema": '{"not": {}}'}, "json_schema", "'not' is not supported"),
        ({"regex": "(a"}, "regex", ""),
        ({"ebnf": '%llguidance {}\nstart: "a"'}, "ebnf", "cannot be used"),
    ],
)
async def test_refusals(ask: Any, fields: dict[str, Any], param: str, words: str) -> None:
    error = await ask(refused=True, tools=STRICT, **fields)
    assert error["param"] == param
    assert words in error["message"]


async def test_thoughts_come_before_the_grammar(ask: Any) -> None:
    opens = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    )
    for fields in ({}, {"response_format": AS_NUMBER}):
        asked = await ask(
            f"hm</think>{GOOD}",
            tools=STRICT,
            front_reasoning="qwen3",
            front_template=opens,
            **fields,
        )
        thinking = asked.request.spec.sampling.thinking
        assert thinking == ThinkingSpec(end_ids=byte_tokenizer().encode("</think>"))
        assert asked.choice["message"]["reasoning_content"] == "hm"
        assert asked.choice["finish_reason"] == "tool_calls"
        assert asked.takes(GOOD)


ARGUMENTS = {
    "json": '{"a": [1]}',
    "qwen_xml": "<parameter=a>\n[1]\n</parameter>",
    "glm_xml": "\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n",
    "minimax_xml": '<parameter name="a">[1]</parameter>\n',
}
OSLO, ROME = (
    {
        "json": f'{{"city": "{city}"}}',
        "qwen_xml": f"<parameter=city>\n{city}\n</parameter>",
        "glm_xml": f"\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n",
        "minimax_xml": f'<parameter name="city">{city}</parameter>\n',
    }
    for city in ("Oslo", "Rome")
)


@pytest.mark.parametrize("name", [n for n in TOOL_PARSERS if TOOL_PARSERS.load(n).call_form])
async def test_every_form_that_a_grammar_describes(
    ask: Any, name: str, request: pytest.FixtureRequest
) -> None:
    """Strict holds inside the family's own tags, and what it lets pass is read back."""
    form = TOOL_PARSERS.load(name).call_form
    assert form is not None

    def written(function: str, arguments: dict[str, str]) -> str:
        return f"{form.begin(function)}{arguments[form.style]}{form.end}"

    fields = {"front_tools": name, "tools": STRICT}
    reply = written("weather", OSLO)
    if form.style != "json" and request.node.callspec.params["ask"] == "llguidance":
        # It knows no arguments but JSON, and says so.
        error = await ask(reply, refused=True, response_format=AS_NUMBER, **fields)
        assert "not known to llguidance" in error["message"]
        assert (await ask(reply, **fields)).is_free
        return
    asked = await ask(reply, response_format=AS_NUMBER, **fields)
    (call,) = asked.choice["message"]["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    two = form.separator.join([reply, written("now", ROME)])
    for text in (ANSWER, reply, written("now", ROME), two):
        assert asked.takes(text), text
    for text in ("Hello.", written("weather", ROME), written("unknown", OSLO), reply[:-1]):
        assert not asked.takes(text), text
    asked = await ask(reply, **fields)
    for text in ("Hello.", f"Well.\n{reply}", f"{two}\nDone."):
        assert asked.takes(text), text
    for text in (written("weather", ROME), written("unknown", OSLO), reply[:-1]):
        assert not asked.takes(text), text


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_what_a_call_form_writes_is_read_back(name: str) -> None:
    parser = TOOL_PARSERS.load(name)
    form = parser.call_form
    if form is None:
        pytest.skip("no grammar describes its calls")
    names = ["f", 'with "quotes"', "naïve"] if form.style == "json" else ["f", "f-2", "naïve"]
    inside = ARGUMENTS[form.style]
    written = form.separator.join(f"{form.begin(each)}{inside}{form.end}" for each in names)
    assert written.startswith(form.trigger)
    reader = OutputParser(tools=parser({name: {} for name in names}, max_calls=None))
    parts = list(WholeCalls().feed(reader.feed(written) + reader.finish()))
    assert parts == [Call(at, name, '{"a": [1]}', True) for at, name in enumerate(names)]
    assert form.trigger in parser.markers[0]
