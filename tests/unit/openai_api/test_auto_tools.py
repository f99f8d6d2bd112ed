"""`tool_choice` auto beside a grammar: which outputs a model may write, with each back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from openai_api.output_parser import Call, OutputParser, WholeCalls
from openai_api.tool_parsers.registry import TOOL_PARSERS
from openai_api.tool_parsers.tool_parser import CallForm
from runtime.requests.sampling_params import ThinkingSpec
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler, drawn
from tests.support.model_outputs import CALL_WRITERS, FUNCTIONS, TOOL_OUTPUTS

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
        tokenizer = byte_tokenizer(more_special=made.pop("special", ()))
        options = {"tools": "hermes", "engine_options": {"tokenizer": tokenizer}, **made}
        front = make_front(lambda _: reply, **options)
        compiler = InProcessCompiler(request.param, tmp_path, tokenizer, [EOS_ID])
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
        {"tools": [tool("now", {"type": "object", "not": {"required": ["b"]}}, strict=True)]},
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


async def test_the_regex_of_a_custom_tool_holds(ask: Any) -> None:
    for definition in ("[A-Z]{2}|[0-9]{3}", "^([A-Z]{2}|[0-9]{3})$"):
        grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}
        tools = [{"type": "custom", "custom": {"name": "code", "format": grammar}}]
        asked = await ask(call("code", '{"input": "AB"}'), tools=tools)
        assert asked.choice["message"]["tool_calls"][0]["custom"]["input"] == "AB"
        choice = {"type": "custom", "custom": {"name": "code"}}
        forced = await ask(
            '[{"name": "code", "parameters": {"input": "123"}}]', tools=tools, tool_choice=choice
        )
        assert forced.choice["message"]["tool_calls"][0]["custom"]["input"] == "123"
        for text, is_good in (
            ("AB", True),
            ("123", True),
            ("12", False),
            ("AB1", False),
            ("", False),
        ):
            arguments = f'{{"input": "{text}"}}'
            assert asked.takes(call("code", arguments)) is is_good, text
            assert forced.takes(f'[{{"name": "code", "parameters": {arguments}}}]') is is_good
        # What JSON writes in another way, too.
        grammar["grammar"]["definition"] = 'say "[a-z]*"'
        asked = await ask(tools=tools)
        for text, is_good in ((r"say \"a\"", True), ("say a", False)):
            assert asked.takes(call("code", f'{{"input": "{text}"}}')) is is_good
        # Lark is shown to the model.
        grammar["grammar"] = {"syntax": "lark", "definition": 'start: "a"'}
        assert (await ask(tools=tools)).is_free


async def test_calls_without_a_tag(ask: Any) -> None:
    """An output that begins like a call is one; others are text, unless a tag comes."""
    asked = await ask(front_tools="llama3", tools=STRICT, front_special=("<|python_tag|>",))
    good = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    loose = '{"name": "now", "parameters": {"a": [1]}}'
    for text in (
        *("", "Hello.", "[1]", "{ }", "{x", '{"answer": 42}', '{"named": 1}', '{"name": 5}'),
        *('{"name": "Bob", "age": 3}', ' {"name" : "weather man"}', f"Like this: {good[:-9]}"),
        *(good, f"\n{good}; {loose}", loose, f"<|python_tag|>{good}", f"Hm<|python_tag|>{loose}"),
        *(f'{{"a": 1}}<|python_tag|>{good}; {good}', '{"nam<|python_tag|>' + good),
    ):
        assert asked.takes(text), text
    bad = good.replace("Oslo", "Rome")
    for text in (
        *(bad, f" {bad}", f"\u00a0{bad}", f"\x0b{bad}", f"{good}; {bad}", f"{good};{bad}"),
        *(f"<|python_tag|>{bad}", f"<<|python_tag|>{bad}", f"Hm<|python_tag|> {bad}"),
        *(f'{{"a": 1}}<|python_tag|>{bad}', f"{good}<|python_tag|>{bad}"),
        *(bad.replace(": ", ":"), bad.replace("name", "n\\u0061me"), bad.replace("we", "\\u0077e")),
        '{"type": "function", "name": "weather", "parameters": {}}',
        '{"parameters": {}, "name": "weather"}',
        '{"id": 1, "name": "weather", "parameters": {}}',
    ):
        assert not asked.takes(text), text


async def test_a_schema_that_cannot_be_followed_leaves_the_others_strict(ask: Any) -> None:
    hard = tool("hard", {"type": "object", "not": {"required": ["b"]}}, strict=True)
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
        ({"json_schema": '{"not": {"minLength": 3}}'}, "json_schema", "'not' is not supported"),
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


PLAN = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "kind": {"enum": ["a b", 'say "hi"', "<tag>"]},
        "exact": {"type": "boolean"},
        "steps": {"type": "array", "items": {"enum": [1, None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["days", "kind", "exact", "steps"],
    "additionalProperties": False,
}
# What a model writes up to the trigger and with it, where that is within a header.
HEADS = {
    "gpt-oss": ["<|start|>assistant<|channel|>commentary to=functions."] * 3,
    "llama3": ["I look. <|python_tag|>", "; ", "; "],
}
# Tags of which families, or some of their tokenizers, make special tokens.
MARKS = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseekv3": TOOL_PARSERS.load("deepseekv3").markers,
    "deepseekv31": TOOL_PARSERS.load("deepseekv31").markers,
    "kimi_k2": TOOL_PARSERS.load("kimi_k2").markers,
    "gpt-oss": (*TOOL_PARSERS.load("gpt-oss").markers, "<|constrain|>", "<|end|>"),
}
NAMES = [name for name in CALL_WRITERS if TOOL_PARSERS.load(name).call_form]
FORMS = [*((name, ()) for name in NAMES), *MARKS.items()]
OSLO, ROME = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})
NOW_ROME, UNKNOWN = ("now", {"city": "Rome"}), ("unknown", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("name", "special"), FORMS, ids=[f"{name}-{len(special)}" for name, special in FORMS]
)
async def test_every_form_that_a_grammar_describes(
    ask: Any, name: str, special: tuple[str, ...]
) -> None:
    """Strict holds inside the family's own tags, and what it lets pass is read back."""
    form, write = TOOL_PARSERS.load(name).call_form, CALL_WRITERS[name]
    assert form is not None
    fields = {"front_tools": name, "front_special": special, "tools": STRICT}
    one, two = write([OSLO]), write([OSLO, NOW_ROME])
    if form.style != "json" and "xgrammar" not in BACKENDS:
        # The other knows no arguments but JSON, and says so.
        error = await ask(one, refused=True, response_format=AS_NUMBER, **fields)
        assert "not known to llguidance" in error["message"]
        assert (await ask(one, **fields)).is_free
        return
    asked = await ask(two, **fields)
    calls = [each["function"] for each in asked.choice["message"]["tool_calls"]]
    assert [(each["name"], orjson.loads(each["arguments"])) for each in calls] == [OSLO, NOW_ROME]
    refused = [write([ROME]), write([OSLO, ROME])]
    if not form.no_call:
        refused.append(write([UNKNOWN]))
    # Where calls need no tag, they are the last.
    more = () if form.no_call else (f"{two}\nDone.", f"{two} and {one}")
    for text in ("Hello.", one, f"Well.\n{one}", two, *more):
        assert asked.takes(text), text
    for text in (*refused, f"{one} and {refused[0]}", one[: len(one) * 2 // 3]):
        assert not asked.takes(text), text
    if not form.stands_alone:
        error = await ask(one, refused=True, response_format=AS_NUMBER, **fields)
        assert "--tool-call-parser" in error["message"]
        return
    asked = await ask(one, response_format=AS_NUMBER, **fields)
    for text in (ANSWER, one, write([NOW_ROME]), two):
        assert asked.takes(text), text
    for text in ("Hello.", *refused, f"Well. {one}"):
        assert not asked.takes(text), text


def skip_unless_known(form: CallForm) -> None:
    if form.style != "json" and "xgrammar" not in BACKENDS:
        pytest.skip("it knows no arguments but JSON")


@pytest.mark.parametrize("name", NAMES)
async def test_recorded_outputs_keep_to_the_form(ask: Any, name: str) -> None:
    """A grammar does not push a model away from how it writes its calls."""
    skip_unless_known(TOOL_PARSERS.load(name).call_form)
    tools = [tool(each, schema) for each, schema in FUNCTIONS.items()]
    tools += [tool("strict", CITY, strict=True)]
    asked = await ask(front_tools=name, front_special=MARKS.get(name, ()), tools=tools)
    several = TOOL_OUTPUTS[name][1].calls
    texts = [TOOL_OUTPUTS[name][0].text, CALL_WRITERS[name](several)]
    if name == "mistral":
        texts += [each.text for each in TOOL_OUTPUTS[name][1:3]]
    for text in texts:
        assert asked.takes(text), text


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("name", "special"), FORMS, ids=[f"{name}-{len(special)}" for name, special in FORMS]
)
async def test_a_random_model_calls_by_the_schema(
    ask: Any,
    name: str,
    special: tuple[str, ...],
    seed: int,
) -> None:
    """Once it begins a call, whatever else it would say, its arguments match."""
    form = TOOL_PARSERS.load(name).call_form
    skip_unless_known(form)
    tools = [tool("plan", PLAN, strict=True), tool("weather", CITY, strict=True)]
    asked = await ask(front_tools=name, front_special=special, tools=tools)
    heads = HEADS.get(name, [form.trigger] * 3)
    text = drawn(asked.compiler, asked.request.grammar, seed, heads)
    reader = OutputParser(
        None, TOOL_PARSERS.load(name)({"plan": PLAN, "weather": CITY}, max_calls=None)
    )
    calls = [
        each
        for each in WholeCalls().feed(reader.feed(text) + reader.finish())
        if isinstance(each, Call)
    ]
    assert len(calls) >= 3
    for call in calls:
        assert call.is_complete
        jsonschema.validate(
            orjson.loads(call.arguments), {"plan": PLAN, "weather": CITY}[call.name]
        )
