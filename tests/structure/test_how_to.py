"""Follows each page of `docs/how-to`: creates its files, adds its lines, and checks the result."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import kernels.activation
import openai_api.routes
from kernels.activation import ACTIVATION, Activation, act_and_mul
from kernels.table import Entry
from openai_api.chat_template import ChatTemplate
from openai_api.parser_choice import choose_parsers
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.client.front_extras import AnsweredSample, Asked, front_extra
from runtime.client.generation_stream import GenerationChunk
from runtime.errors import StartupError
from runtime.models.attention.backend import ATTENTION_BACKENDS
from runtime.requests.extra_spec import EXTRAS
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model
from tests.unit.openai_api.conftest import events_of, make_front

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = sorted(path.name for path in FOLDER.glob("*.md"))
# Those whose blocks are followed here.
FOLLOWED = (
    "add-a-kernel.md",
    "add-a-parser.md",
    "add-an-attention-backend.md",
    "add-an-endpoint.md",
    "add-an-extra.md",
)
BLOCK = re.compile(
    r"^```(?:python|text)\n# (\S+?\.py)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)

assert make_front  # a fixture

Block = tuple[str, str, str]


def blocks(page: str) -> list[Block]:
    """(path, table, code) of each block: a file's content, or lines of a table."""
    found: list[Block] = BLOCK.findall((FOLDER / page).read_text())
    return found


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """Make the files of a page as modules; the lines of its tables come back, by table."""

    def follow(page: str) -> dict[str, str]:
        lines: dict[str, str] = {}
        for path, table, code in blocks(page):
            if table:
                lines[table] = code
                continue
            name = path.removesuffix(".py").replace("/", ".")
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(code, f"{page}: {path}", "exec"), module.__dict__)
        return lines

    return follow


def table_of(lines: str, **names: Any) -> dict[str, Any]:
    """The entries that `lines` add to a table."""
    entries: dict[str, Any] = eval(f"{{{lines}}}", names)
    return entries


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    assert len((FOLDER / page).read_text().splitlines()) < 150


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (FOLDER / page).read_text()
    made = {path for path, table, _ in blocks(page) if not table}
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md))`", BLOCK.sub("", text)))
    assert [path for path in sorted(named - made) if not (FOLDER.parents[1] / path).exists()] == []


@pytest.mark.parametrize("page", FOLLOWED)
def test_tables_of_a_page_exist_and_its_files_do_not(page: str) -> None:
    for path, table, code in blocks(page):
        ast.parse(
            code if not table else f"({code})" if code.startswith("Endpoint") else f"{{{code}}}"
        )
        if table:
            module = importlib.import_module(
                path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
            )
            assert hasattr(module, table.partition(".")[0])
        else:
            assert not (FOLDER.parents[1] / path).exists()
            # Of what is a folder of its own, the one around it.
            assert any((FOLDER.parents[1] / path).parents[depth].is_dir() for depth in (0, 1))


CALLS = 'Sum: [[add {"a": 1, "b": 2}]] and [[fly {}]] [[add {"a": ]] [x] [[add {"a"'


async def test_a_tool_parser(follow: Any, make_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = follow("add-a-parser.md")
    for name, path in table_of(lines["TOOL_PARSERS"]).items():
        monkeypatch.setitem(TOOL_PARSERS.entries, name, path)
    front = make_front(lambda _: CALLS, tools="double-bracket")
    tools = [{"type": "function", "function": {"name": "add"}}]
    whole = (await front.chat("Go", tools=tools)).json()["choices"][0]
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    arguments = ['{"a": 1, "b": 2}', '{"a": ', '{"a"']
    assert functions == [{"name": "add", "arguments": each} for each in arguments]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Sum: and [[fly {}]] [x]"
    # One character a step.
    deltas = [
        event["choices"][0]["delta"]
        for event in events_of(await front.chat("Go", tools=tools, stream=True))
    ]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert streamed == whole["message"]["content"]
    calls = [each for delta in deltas for each in delta.get("tool_calls") or ()]
    assert "".join(each["function"]["arguments"] for each in calls) == "".join(arguments)
    written = ChatTemplate("{{ 'Put calls in brackets: [[' ~ name ~ ']]' }}")
    assert choose_parsers("auto", "auto", written, {}).tools == "double-bracket"
    described = {"fields": {"tool_calls": {"open": "[[", "content": "json"}}}
    assert choose_parsers("auto", "auto", None, described).tools == "double-bracket"
    form = TOOL_PARSERS.load("double-bracket").call_form
    assert form is not None
    assert form.trigger + form.begin("add") + '{"a": 1, "b": 2}' + form.end in CALLS


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    from openai_api.parsers import ParserSet

    with pytest.raises(StartupError, match="Known: deepseek_v3, "):
        ParserSet.choose(None, "double-bracket", None)


async def test_an_endpoint(follow: Any, make_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = follow("add-an-endpoint.md")
    assert (await make_front().post("/v1/count", {"texts": ["Hi"]})).status_code == 404
    names = {**vars(openai_api.routes), **vars(sys.modules["openai_api.schemas.count"])}
    added = eval(f"({lines['ENDPOINTS']})", names)
    endpoints = (*openai_api.routes.ENDPOINTS, *added)
    monkeypatch.setattr(openai_api.routes, "ENDPOINTS", endpoints)
    front = make_front()
    answer = await front.post("/v1/count", {"texts": ["Hi", "Hello"]})
    assert answer.status_code == 200
    assert answer.json() == {"counts": [2, 5]}
    for wrong in ({"texts": "Hi"}, {"texts": []}, {}):
        refused = await front.post("/v1/count", wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "texts"


@pytest.mark.parametrize("model", ["qwen3", "mistral_window"])
def test_an_attention_backend(follow: Any, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    lines = follow("add-an-attention-backend.md")
    for name, path in table_of(lines["ATTENTION_BACKENDS"]).items():
        monkeypatch.setitem(ATTENTION_BACKENDS.entries, name, path)
    prompts = [[5, 6, 7, 8, 9] * 5, [300, 2, 7]]
    tokens: dict[str, dict[int, list[int]]] = {}
    for backend in ("torch", "by_token"):
        # Prompts in chunks, beside rows that decode.
        engine = InProcessEngine(
            tiny_model(model), attention_backend=backend, chunked_prefill_size=7, page_size=4
        )
        for request_id, prompt in enumerate(prompts):
            engine.add(request_id, prompt, 12, ignore_eos=True)
        engine.run()
        tokens[backend] = engine.tokens
    assert tokens["by_token"] == tokens["torch"]
    assert [len(each) for each in tokens["torch"].values()] == [12, 12]


def test_a_kernel(follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = follow("add-a-kernel.md")
    assert ACTIVATION.choose("cpu").name != "in_place"
    for name, entry in table_of(lines["ACTIVATION.entries"], Entry=Entry).items():
        monkeypatch.setitem(ACTIVATION.entries, name, entry)
    for device, order in table_of(lines["ACTIVATION.preferred"]).items():
        monkeypatch.setitem(ACTIVATION.preferred, device, order)
    chosen = ACTIVATION.choose("cpu")
    assert (chosen.name, chosen.reason) == ("in_place", "fastest of those measured on an x86 CPU")
    x = torch.randn(5, 64)
    # The public op asks the table once a process.
    monkeypatch.setattr(
        kernels.activation, "_kernels", lambda device: ACTIVATION.choose(device).kernels
    )
    for activation in get_args(Activation):
        wanted = ACTIVATION.load("reference").act_and_mul(x, activation)
        assert torch.equal(act_and_mul(x, activation), wanted)
    monkeypatch.setattr(
        sys.modules["kernels.activation.in_place"], "unavailable", lambda: "no luck"
    )
    chosen = ACTIVATION.choose("cpu")
    assert chosen.name != "in_place"
    assert "in_place: no luck" in chosen.reason


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7}], ids=["whole", "chunked"])
def test_an_extra(follow: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    lines = follow("add-an-extra.md")
    for name, package in table_of(lines["EXTRAS"]).items():
        monkeypatch.setitem(EXTRAS, name, package)
    front_extra.cache_clear()
    front = front_extra("best_token")
    assert front.plan(SimpleNamespace(return_best_token=None), Asked(1, 512)) is None
    (spec,) = front.plan(SimpleNamespace(return_best_token=True), Asked(1, 512)) or ()
    assert spec is not None
    prompt = [5 + 7 * place % 490 for place in range(40)]
    engine = InProcessEngine(tiny_model("qwen3"), **options)
    engine.add(1, prompt, 5, ignore_eos=True)
    engine.run()
    # What is cached now must be computed again where it is reported.
    engine.add(2, prompt, 5, extras=[spec], ignore_eos=True)
    engine.run()
    tokens = engine.tokens[2]
    assert tokens == engine.tokens[1]
    answer = front.answer(spec, AnsweredSample(prompt, engine.hidden_size, str))
    extras = engine.blocks[2, "best_token"]
    answer.add(GenerationChunk("", tokens, None, 40, 0, extras=extras), incremental=False)
    meta = answer.meta_info()
    # Greedily the most probable token is the one that is generated.
    assert meta["output_best"] == tokens
    assert len(meta["input_best"]) == len(prompt) - 1
    # What is best behind a part of the prompt is what that part alone goes on with.
    for length in (5, 23, 39):
        generated = engine.generate(prompt[:length], 1, ignore_eos=True)
        assert generated == [meta["input_best"][length - 1]]
