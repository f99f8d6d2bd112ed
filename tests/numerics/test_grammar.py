"""Outputs that follow a grammar: always matching, and the same whatever runs beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from runtime.messages import AbortRequests, FlushCache, GenerateRequest, StopHit
from runtime.sampling_params import GrammarSpec, SamplingParams
from runtime.tokenizer import Tokenizer
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

pytest.importorskip("xgrammar")

DEMO = Path(MODEL_PATH)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
DATE = GrammarSpec("regex", r"[12][0-9]{3}-(0[1-9]|1[0-2])-[0-3][0-9]")
LIST = GrammarSpec("ebnf", 'root ::= "(" item ("," item){1,3} ")"\nitem ::= "x" | "yz"')
TAG = GrammarSpec(
    "structural_tag",
    json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": {"enum": [1, "two", None]}},
                "end": "</call>",
            },
        }
    ),
)


def matches(spec: GrammarSpec, text: str) -> bool:
    match spec.kind:
        case "regex":
            return re.fullmatch(spec.text, text) is not None
        case "ebnf":
            return re.fullmatch(r"\((x|yz)(,(x|yz)){1,3}\)", text) is not None
        case "structural_tag":
            inner = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
            return inner is not None and json.loads(inner[1]) in (1, "two", None)
        case _:
            value = json.loads(text)
            return (
                list(value) == ["name", "age", "tags"]
                and len(value["name"]) <= 6
                and 0 <= value["age"] <= 120
                and len(value["tags"]) <= 2
                and set(value["tags"]) <= {"a", "b"}
            )


SPECS = (PERSON, DATE, LIST, TAG)


def engine(folder: Path, **options: Any) -> InProcessEngine:
    return InProcessEngine(folder, grammar_backend="xgrammar", **options)


def texts(made: InProcessEngine, folder: Path) -> dict[int, str]:
    backend = Tokenizer.from_folder(folder).backend
    return {i: backend.decode(ids) for i, ids in made.tokens.items()}


@pytest.mark.parametrize("model", ["demo", "qwen3", "llama"])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_output_matches(model: str, overlap: bool) -> None:
    folder = DEMO if model == "demo" else tiny_model(model)
    made = engine(folder, overlap=overlap, chunked_prefill_size=16)
    specs = {}
    for index in range(32):
        specs[index + 1] = SPECS[index % len(SPECS)]
        made.add(
            index + 1,
            [5 + index % 7] * (1 + index * 3 % 40),
            200,
            temperature=0.0 if index % 3 else 1.0,
            seed=index,
            grammar=specs[index + 1],
            # What the grammar forbids no bias brings back.
            logit_bias={10: 100.0, 50: 10_000.0} if index % 2 else {},
            frequency_penalty=0.5 if index % 5 == 0 else 0.0,
            ignore_eos=index % 7 == 0,
            min_new_tokens=150 if index % 11 == 0 else 0,
        )
    made.run()
    found = texts(made, folder)
    for request_id, spec in specs.items():
        reason = made.reasons[request_id]
        if reason.type == "length":
            # Free whitespace and a random model; the rest must have ended by the grammar.
            assert spec is PERSON
            continue
        assert reason.type == "stop", reason
        assert reason.matched == made.tokens[request_id][-1]
        assert matches(spec, found[request_id]), found[request_id]
    made.scheduler._check_invariants()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pool", "page_size"), [(4096, 16), (112, 4)])
def test_output_alone_equals_output_among_neighbours(
    overlap: bool, pool: int, page_size: int
) -> None:
    folder = tiny_model("qwen3")
    prompt = [11, 12, 13, 14]
    alone = engine(folder)
    expected = {}
    for index, spec in enumerate(SPECS):
        alone.add(index + 1, prompt, 60, grammar=spec)
        alone.run()
        expected[spec.kind] = alone.tokens[index + 1]
    plain = alone.generate(prompt, 40)
    # A small pool forces retractions: the grammar's place is kept, no token is accepted twice.
    crowd = engine(
        folder,
        overlap=overlap,
        max_total_tokens=pool,
        page_size=page_size,
        chunked_prefill_size=8,
    )
    wanted = {}
    for index in range(16):
        request_id = index + 1
        spec = SPECS[index % 4] if index % 5 else None
        if spec is None:
            crowd.add(request_id, prompt, 40)
            wanted[request_id] = plain
        else:
            crowd.add(request_id, prompt, 60, grammar=spec)
            wanted[request_id] = expected[spec.kind]
    for index in range(8):
        crowd.add(
            100 + index, [20 + index] * 9, 50, temperature=1.0, seed=index, grammar=SPECS[index % 4]
        )
    for _ in range(6):
        crowd.scheduler.step()
    crowd.scheduler.receive([AbortRequests([100, 103]), StopHit([101])])
    crowd.run()
    for request_id, tokens in wanted.items():
        assert crowd.tokens[request_id] == tokens, request_id
    assert crowd.reasons[100].type == "abort"
    if pool < 1000:
        assert crowd.scheduler._planner.num_retractions > 0


def test_a_grammar_may_begin_after_a_token() -> None:
    folder = tiny_model("qwen3")
    made = engine(folder)
    free = made.generate([7, 8, 9], 12, ignore_eos=True)
    after = free[3]
    at = free.index(after)
    made.add(50, [7, 8, 9], 60, grammar=DATE, grammar_after=after, ignore_eos=True)
    made.run()
    tokens = made.tokens[50]
    assert tokens[: at + 1] == free[: at + 1]
    assert matches(DATE, Tokenizer.from_folder(folder).backend.decode(tokens[at + 1 :]))


def test_special_tokens_never_stand_for_their_text() -> None:
    folder = DEMO
    made = engine(folder)
    start = Tokenizer.from_folder(folder).encode("<|im_start|>", add_special_tokens=False)
    assert len(start) == 1
    spec = GrammarSpec("regex", ".{5,10}")
    made.add(1, [5, 6], 40, grammar=spec, logit_bias={start[0]: 10_000.0})
    made.run()
    assert start[0] not in made.tokens[1]


def test_a_grammar_that_is_not_there_ends_its_request_only() -> None:
    folder = tiny_model("qwen3")
    made = engine(folder)
    expected = made.generate([3, 4, 5], 10)
    sampling = SamplingParams(max_new_tokens=10, temperature=0.0, seed=1)
    ids = bytes([3, 0, 0, 0])
    made.scheduler.receive(
        [
            GenerateRequest(20, ids, sampling, grammar_key=b"lost"),
            GenerateRequest(21, ids, sampling, grammar_key=b"bad", grammar=b"{"),
            GenerateRequest(22, ids, sampling, grammar_key=b"gone", grammar=b"{}"),
            AbortRequests([22]),
            FlushCache(1),
        ]
    )
    made.add(23, [3, 4, 5], 10)
    made.run()
    assert made.tokens[23] == expected
    assert [made.reasons[i].status_code for i in (20, 21)] == [500, 500]
    assert made.reasons[22].type == "abort"
    off = InProcessEngine(folder)
    off.scheduler.receive([GenerateRequest(1, ids, sampling, grammar_key=b"k", grammar=b"{}")])
    off.run()
    assert off.reasons[1].status_code == 500
