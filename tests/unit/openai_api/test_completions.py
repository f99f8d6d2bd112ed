"""`/v1/completions` and `/v1/models` over a fake engine."""

from __future__ import annotations

import array
import re
from typing import Any

import pytest
from openai.types.completion_choice import Logprobs

from openai_api.best_of import SampleScores
from runtime.client.generation_stream import GenerationChunk
from runtime.extras.logprobs.positions import LogprobArrays
from runtime.ipc.messages import FinishReason
from runtime.requests.extra_spec import ExtraBlock
from tests.support.fake_engine import EOS_ID
from tests.unit.openai_api.conftest import events_of


async def test_whole_answer(make_front: Any) -> None:
    answer = (await make_front().complete("Hello")).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer["id"])
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS_ID,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["metadata"] == {"weight_version": "default"}


async def test_defaults_are_openais_not_the_models(make_front: Any) -> None:
    front = make_front(model_defaults={"temperature": 0.1})
    answer = (await front.complete("x" * 40)).json()
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert front.engine.requests[0].spec.sampling.temperature == 1.0
    # Close to the context's end, our own default gives way.
    assert (await front.complete([65] * 4090)).json()["usage"]["completion_tokens"] == 6
    assert (await front.complete([65] * 4090, max_tokens=16)).status_code == 400


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
async def test_prompt_lists(make_front: Any, prompt: Any) -> None:
    front = make_front()
    answer = (await front.complete(prompt, n=2, echo=True, rid=["r", "s"])).json()
    assert answer["id"] == "r"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["abab", "abab", "cc", "cc"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * 3 + 2 * 2


async def test_stream(make_front: Any, events: Any) -> None:
    front = make_front()
    asked = {"stream": True, "echo": True, "stream_options": {"include_usage": True}, "stop": "o"}
    chunks = events(await front.complete(["Hello", "Bye"], **asked))
    texts = ["", ""]
    ends: list[Any] = [None, None]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
        if choice["index"] == 0 and choice["finish_reason"]:
            assert choice["matched_stop"] == "o"
    assert texts == ["HelloHell", "ByeBye"]
    assert ends == ["stop", "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 8


async def test_characters_of_several_tokens(make_front: Any, events: Any) -> None:
    chunks = events(await make_front().complete("ü😀日", stream=True, max_tokens=50))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ü😀日"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a"] * 5000}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": 1001}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 100, "prompt": ["a"] * 100}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
async def test_refusals_name_the_field(make_front: Any, fields: dict[str, Any], param: str) -> None:
    front = make_front()
    answer = await front.post("/v1/completions", {"prompt": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["param"] == param
    assert front.engine.client.num_in_flight == 0


async def test_neutral_fields_pass(make_front: Any) -> None:
    neutral = {"logprobs": None, "suffix": "", "best_of": 1, "max_tokens": None, "user": "u"}
    assert (await make_front().complete("Hi", **neutral)).status_code == 200
    assert (await make_front().complete("Hi", logprobs=False)).status_code == 200


async def test_too_long(make_front: Any) -> None:
    answer = await make_front().complete([65] * 4096)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = await make_front().complete("x" * (4096 * 128 + 1))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_one_refused_choice_ends_the_request(make_front: Any) -> None:
    front = make_front()
    front.engine.refuse = FinishReason("abort", message="Too much.", status_code=503)
    answer = await front.complete(["a", "b"])
    assert answer.status_code == 503
    assert front.engine.client.num_in_flight == 0


async def test_models(make_front: Any) -> None:
    front = make_front(created=7)
    front.engine.client.ready = False
    card = {
        "id": "org/fake",
        "object": "model",
        "created": 7,
        "owned_by": "sglang",
        "root": "org/fake",
        "parent": None,
        "max_model_len": 4096,
    }
    async with front.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert listed == {"object": "list", "data": [card]}
        assert (await client.get("/v1/models/org/fake")).json() == card
        missing = await client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"] == {
        "message": "The model 'org/other' does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize("top", [0, 7])
async def test_a_prompt_is_scored_without_generating(make_front: Any, top: int) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": top}
    answer = (await make_front().complete("Hello", **fields)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    lists = choice["logprobs"]
    assert lists["tokens"] == list("Hello")
    assert lists["token_logprobs"][0] is None
    assert None not in lists["token_logprobs"][1:]
    assert len(lists["token_logprobs"]) == 5
    tops = lists["top_logprobs"] or []
    assert [len(each) for each in tops[1:]] == [top] * 4 * bool(top)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_every_position_has_all_alternatives(make_front: Any, stream: bool) -> None:
    # The fake's most probable ones are the bytes from 97 on: beyond 127 none is a character.
    front = make_front(lambda _: "a\u201d")
    answer = await front.complete("Hi", logprobs=100, stream=stream)
    bodies = events_of(answer) if stream else [answer.json()]
    lists = [Logprobs.model_validate(body["choices"][0]["logprobs"]) for body in bodies]
    tokens = [each for one in lists for each in one.tokens or []]
    tops = [each for one in lists for each in one.top_logprobs or []]
    assert tokens[:4] == ["a", r"bytes:\xe2", r"bytes:\x80", r"bytes:\x9d"]
    assert len(tops) == len(tokens)
    for top in tops:
        assert len(top) == 100
        assert r"bytes:\x80" in top
        assert list(top)[:2] == ["a", "b"]


async def test_alternatives_that_read_the_same_are_all_there(make_front: Any) -> None:
    front = make_front()
    # Ids beyond the vocabulary stand for no text.
    lists = (await front.complete("Hi", logprobs=300)).json()["choices"][0]["logprobs"]
    assert all(len(top) == 300 for top in lists["top_logprobs"])


async def test_log_probabilities_have_their_own_name_in_refusals(make_front: Any) -> None:
    front = make_front()
    body = {"prompt": ["Hello"] * 128, "logprobs": 1000, "max_tokens": 4000, "n": 8}
    answer = await front.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["param"] == "logprobs"
    assert "top_logprobs_num" not in answer.json()["message"]


async def test_best_of_answers_the_most_probable(make_front: Any) -> None:
    front = make_front()
    answer = (await front.complete(["ab", "c"], n=1, best_of=3)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert len(front.engine.requests) == 6
    # The prompts count once, what was made for nothing as well.
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 3 * (3 + 2)
    same = (await front.complete("ab", n=2, best_of=2, stream=False)).json()
    assert len(same["choices"]) == 2
    assert not front.engine.requests[-1].spec.extras


def test_scores_are_means() -> None:
    scores = SampleScores(4)

    def add(index: int, values: list[float]) -> None:
        data = LogprobArrays(array.array("f", values).tobytes()).encode()
        block = ExtraBlock(1, "logprobs", False, data)
        ids = [5] * len(values)
        scores.add(index, GenerationChunk("", ids, None, 1, 0, extras=[block]))

    add(0, [-1.0, -1.0])
    add(0, [-1.0])
    add(1, [-0.5, -2.5])
    add(2, [-0.25] * 8)
    add(3, [-1.0])
    assert scores.best(range(4), 4) == [2, 0, 3, 1]
    assert scores.best([0, 1, 3], 2) == [0, 3]
