"""Structured output over HTTP: texts of added tokens, and limits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.demo import MODEL_PATH
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import wordpiece, write_folder

pytestmark = needs_grammars


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(backend: str) -> Iterator[ServerProcess]:
    # Its tokenizer has `<think>`, `<tool_call>` and their ends as added tokens, not special ones.
    with ServerProcess("--model-path", MODEL_PATH, "--grammar-backend", backend) as made:
        yield made.wait_ready()


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    for _ in range(10):
        answer = server.client.post(path, json=body)
        # A machine that had no time to compile a grammar says nothing of it.
        if answer.status_code != 503 or "too busy" not in answer.text:
            break
    return answer


def generate(server: ServerProcess, **sampling: Any) -> httpx.Response:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 120, **sampling}}
    return post(server, "/generate", body)


def tag(begin: str, content: dict[str, Any], end: str) -> str:
    form = {"type": "tag", "begin": begin, "content": content, "end": end}
    return json.dumps({"type": "structural_tag", "format": form})


VALUE = {"type": "json_schema", "json_schema": {"enum": ["x", 1]}}
CASES: list[tuple[dict[str, str], str]] = [
    ({"regex": "<tool_call>"}, "<tool_call>"),
    ({"regex": "a</tool_call>b"}, "a</tool_call>b"),
    ({"regex": "<think>[a-z]{3}</think>"}, "<think>[a-z]{3}</think>"),
    ({"ebnf": 'root ::= "<think>" [a-z]{2} "</think>"'}, "<think>[a-z]{2}</think>"),
    ({"json_schema": '{"enum": ["</tool_call>"]}'}, '"</tool_call>"'),
    (
        {"structural_tag": tag("<tool_call>", VALUE, "</tool_call>")},
        '<tool_call>("x"|1)</tool_call>',
    ),
    (
        {"structural_tag": tag("a", {"type": "const_string", "value": "b"}, "</tool_call>")},
        "ab</tool_call>",
    ),
    # The text of special tokens is spelled: the tokens themselves end it, or are hidden.
    ({"regex": r"<\|im_end\|>"}, r"<\|im_end\|>"),
    ({"json_schema": '{"enum": ["<|im_end|>"]}'}, r'"<\|im_end\|>"'),
    ({"json_schema": '{"const": "a<|endoftext|><think>"}'}, r'"a<\|endoftext\|><think>"'),
]


@pytest.mark.parametrize(("constraint", "pattern"), CASES, ids=lambda each: str(each)[:50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_of_added_tokens(
    server: ServerProcess, constraint: dict[str, str], pattern: str, temperature: float
) -> None:
    answer = generate(server, **constraint, temperature=temperature, sampling_seed=3)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "stop"
    # One value of JSON may have blanks on both sides in a tag.
    assert re.fullmatch(pattern, re.sub(r"\s", "", answer.json()["text"])), answer.text


@pytest.mark.parametrize(
    "constraint",
    [
        {"ebnf": "root ::= " + '"a"? ' * 5000},
        {
            "json_schema": json.dumps(
                {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"a": {"type": "string", "maxLength": 100_000}},
                        }
                    ]
                    * 300
                }
            )
        },
    ],
    ids=["many optional parts", "many alike alternatives"],
)
def test_what_goes_beyond_a_limit_is_refused_before_it_is_followed(
    server: ServerProcess, backend: str, constraint: dict[str, str]
) -> None:
    ((kind, _),) = constraint.items()
    if backend == "xgrammar" and kind == "ebnf":
        pytest.skip("slow to compile, as those of test_structured_output.py are")
    answer = generate(server, **constraint, ignore_eos=True)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{kind} cannot be used: ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ['say "yes"', "n(o"]}, r'say "yes"|n\(o'),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_json": {"enum": [7]}}, "7"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"response_format": {"type": "json_object", "schema": {"const": "a"}}}, '"a"'),
        ({"grammar": 'root ::= "u" | "v"'}, "u|v"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_fields_of_other_servers_are_followed(
    server: ServerProcess, path: str, fields: dict[str, Any], pattern: str
) -> None:
    prompt = (
        {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    answer = post(server, path, {"max_tokens": 40, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert re.fullmatch(pattern, text), answer.text
    refused = {**prompt, "structured_outputs": {"regex": "a", "whitespace_pattern": " "}}
    answer = post(server, path, refused)
    assert answer.status_code == 400
    assert "response_format" in answer.json()["error"]["message"]


@pytest.mark.skipif("llguidance" not in BACKENDS, reason="the library that cannot read it")
def test_a_tokenizer_that_the_library_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), folder)
    write_folder(folder, wordpiece())
    with ServerProcess("--model-path", str(folder), "--grammar-backend", "llguidance") as server:
        server.wait_ready()
        if "xgrammar" in BACKENDS:
            # The other can. On a CPU, a library is loaded with the first grammar.
            assert generate(server, regex="a").status_code == 200
            server.wait_for_line("llguidance cannot work with this tokenizer")
            return
        assert generate(server, regex="a").status_code == 400
        server.wait_for_line("structured output is not available for this model")
        (line,) = [each for each in server.lines if "structured output is not available" in each]
        assert "decoder" in line
        for _ in range(2):
            answer = generate(server, regex="a")
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "--grammar-backend llguidance cannot work with its tokenizer (" in message
            assert "decoder" in message
        assert generate(server, max_new_tokens=2).status_code == 200
        assert "starting it again" not in server.log
