"""Outputs that follow a grammar: always matching, and the same whatever runs beside them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.messages import AbortRequests, FlushCache, GenerateRequest, StopHit
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import GrammarSpec, SamplingParams, ThinkingSpec
from runtime.text.tokenizer import Tokenizer
from tests.support.engine import InProcessEngine
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.tiny_models import tiny_model

pytestmark = needs_grammars

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


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(folder: Path, backend: str, **options: Any) -> InProcessEngine:
    return InProcessEngine(folder, grammar_backend=backend, **options)


def texts(made: InProcessEngine, folder: Path) -> dict[int, str]:
    backend = Tokenizer.from_folder(folder).backend
    return {i: backend.decode(ids) for i, ids in made.tokens.items()}


@pytest.mark.parametrize(
    ("model", "overlap"),
    [("demo", False), ("demo", True), ("qwen3", False), ("qwen3", True), ("llama", False)],
)
def test_every_output_matches(backend: str, model: str, overlap: bool) -> None:
    folder = DEMO if model == "demo" else tiny_model(model)
    made = engine(folder, backend, overlap=overlap, chunked_prefill_size=16)
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
    made.scheduler.check_invariants()


# What runs around a request must not be seen in its output.
NEIGHBOURS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1, "grammar": PERSON},
    {"temperature": 0.7, "seed": 2, "grammar": DATE, "logit_bias": {17: 5.0, 40: -3.0}},
    {"grammar": LIST, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.3, "seed": 4, "grammar": TAG, "top_k": 5},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "seed": 6, "logit_bias": {3: 100.0}, "ignore_eos": True},
    {"temperature": 0.9, "seed": 7, "min_p": 0.1, "min_new_tokens": 20},
    {"grammar": PERSON, "logprobs": LogprobSpec(-1, 3, [])},
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pool", "page_size"), [(4096, 16), (112, 4)])
def test_output_alone_equals_output_among_neighbours(
    backend: str, overlap: bool, pool: int, page_size: int
) -> None:
    folder = tiny_model("qwen3")
    prompt = [11, 12, 13, 14]
    alone = engine(folder, backend)
    expected = {}
    for index, spec in enumerate(SPECS):
        alone.add(index + 1, prompt, 60, grammar=spec)
        alone.run()
        expected[spec.kind] = alone.tokens[index + 1]
    plain = alone.generate(prompt, 40)
    # A small pool forces retractions: the grammar's place is kept, no token is accepted twice.
    crowd = engine(
        folder,
        backend,
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
    for index in range(len(NEIGHBOURS)):
        crowd.add(100 + index, [20 + index] * 9, 50, **NEIGHBOURS[index])
    for _ in range(6):
        crowd.scheduler.step()
    crowd.scheduler.receive([AbortRequests([100, 103]), StopHit([101])])
    crowd.run()
    for request_id, tokens in wanted.items():
        assert crowd.tokens[request_id] == tokens, request_id
    assert crowd.reasons[100].type == "abort"
    if pool < 1000:
        assert crowd.shared["num_retractions_total"] > 0


def test_a_grammar_may_begin_after_a_token(backend: str) -> None:
    folder = tiny_model("qwen3")
    made = engine(folder, backend)
    free = made.generate([7, 8, 9], 12, ignore_eos=True)
    after = free[3]
    at = free.index(after)
    thinking = ThinkingSpec(end_ids=[after])
    made.add(50, [7, 8, 9], 60, grammar=DATE, thinking=thinking, ignore_eos=True)
    made.run()
    tokens = made.tokens[50]
    assert tokens[: at + 1] == free[: at + 1]
    assert matches(DATE, Tokenizer.from_folder(folder).backend.decode(tokens[at + 1 :]))


def test_special_tokens_never_stand_for_their_text(backend: str) -> None:
    folder = DEMO
    made = engine(folder, backend)
    start = Tokenizer.from_folder(folder).encode("<|im_start|>", add_special_tokens=False)
    assert len(start) == 1
    spec = GrammarSpec("regex", ".{5,10}")
    made.add(1, [5, 6], 40, grammar=spec, logit_bias={start[0]: 10_000.0})
    made.run()
    assert start[0] not in made.tokens[1]


def test_a_grammar_that_is_not_there_ends_its_request_only(backend: str) -> None:
    folder = tiny_model("qwen3")
    made = engine(folder, backend)
    expected = made.generate([3, 4, 5], 10)
    spec = RequestSpec(
        row=RowSpec(sampling=SamplingParams(max_new_tokens=10, temperature=0.0, seed=1))
    )
    ids = bytes([3, 0, 0, 0])
    made.scheduler.receive(
        [
            GenerateRequest(20, ids, spec, grammar_key=b"lost"),
            GenerateRequest(21, ids, spec, grammar_key=b"bad", grammar=b"\xff{"),
            GenerateRequest(22, ids, spec, grammar_key=b"gone", grammar=b"{}"),
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
    off.scheduler.receive([GenerateRequest(1, ids, spec, grammar_key=b"k", grammar=b"{}")])
    off.run()
    assert off.reasons[1].status_code == 500


@pytest.mark.skipif("llguidance" not in BACKENDS, reason="its limit")
def test_a_limit_met_underway_is_no_failure_of_the_server() -> None:
    made = engine(tiny_model("qwen3"), "llguidance")
    # Compiled without the walk that would have found it.
    spec = GrammarSpec("ebnf", "root ::= " + '"a"? ' * 1000)
    made.add(1, [5, 6], 40, grammar=spec, min_new_tokens=5)
    made.add(2, [3, 4, 5], 10)
    made.run()
    assert made.reasons[1].status_code == 400
    assert "cannot be followed any further" in str(made.reasons[1].message)
    assert made.reasons[2].type == "length"


def test_outputs_that_all_end_in_one_step_are_not_taken_for_slow(backend: str) -> None:
    made = engine(tiny_model("qwen3"), backend)
    for index in range(4):
        made.add(index + 1, [5 + index], 3, grammar=GrammarSpec("regex", "[a-c]{20}"))
    made.run()
    assert not made.grammars.is_watching


# The single token that may follow is not sampled, and nobody can tell.
@pytest.mark.parametrize("model", ["demo", "qwen3"])
@pytest.mark.parametrize(("pool", "page_size"), [(4096, 16), (160, 4)])
def test_jump_ahead_changes_nothing_but_the_number_of_steps(
    backend: str, model: str, pool: int, page_size: int
) -> None:
    folder = DEMO if model == "demo" else tiny_model(model)
    letters = GrammarSpec("regex", "[a-c](-_-[a-c]){3,5}")
    specs = (letters, LIST, DATE, PERSON)

    def run(*, jump: bool) -> tuple[InProcessEngine, int]:
        made = engine(
            folder, backend, max_total_tokens=pool, page_size=page_size, chunked_prefill_size=8
        )
        # A thread loads them: how soon must not count.
        for spec in specs:
            made.generate([100], 1, grammar=spec)
        num_before = len(made.tokens)
        for index in range(12):
            made.add(
                num_before + index + 1,
                [5 + index] * (1 + index % 5),
                # Some are cut off in the middle of what is forced.
                (60, 7, 8, 60)[index % 4],
                temperature=float(index % 2),
                seed=index,
                grammar=specs[index % 4] if index % 6 else None,
                grammar_is_cached=True,
                **({"presence_penalty": 0.4} if index == 4 else {}),
                # What reports each sample does not jump.
                logprobs=LogprobSpec(-1, 2, []) if index == 8 or not jump else None,
            )
        num_steps = 0
        while made.scheduler.has_work:
            made.scheduler.step()
            num_steps += 1
        made.scheduler.check_invariants()
        return made, num_steps

    (plain, num_plain), (made, num_steps) = run(jump=False), run(jump=True)
    assert made.tokens == plain.tokens
    assert made.reasons == plain.reasons
    assert plain.most_at_once == 1
    assert made.most_at_once > 1
    if pool > 1000:
        # With retractions the number of steps is a matter of luck.
        assert num_steps < num_plain


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probabilities_are_those_behind_the_mask(backend: str, temperature: float) -> None:
    folder = tiny_model("qwen3")
    letter = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False)[0]
    made = engine(folder, backend)
    made.add(
        1,
        [9, 8, 7],
        20,
        logprobs=LogprobSpec(-1, 40, [letter]),
        grammar=GrammarSpec("regex", "(0|1){6}"),
        temperature=temperature,
    )
    made.run()
    assert re.fullmatch("[01]{6}", texts(made, folder)[1])
    assert len(made.outputs[1]) == len(made.tokens[1]) > 1
    for token_id, found in zip(made.tokens[1], made.outputs[1], strict=True):
        # All the probability is on the few tokens that are allowed; the others' stays a number.
        assert {i: value for value, i in found.top}[token_id] == found.logprob
        assert sum(math.exp(value) for value, _ in found.top) == pytest.approx(1, abs=1e-4)
        assert found.id_values == [-1e9]
