"""Expensive requests: the event loop continues meanwhile, and streams keep their text.

A separate process requests `/livez` every few milliseconds, beside greedy streams; see
`livez_prober`. Each attack is refused by a count, or processed in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import orjson
import pytest

from tests.support.livez_prober import LivezProber
from tests.support.neighbours import Neighbours, greedy
from tests.support.processes import resident_kb
from tests.support.server import ROOT, ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NUM_TRIES = 3
TEXT = "The miller opens the gate and walks. " * 1622
assert len(TEXT) > 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(ROOT / "headrace/demo/model"), plain=True) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def prober(server: ServerProcess) -> Iterator[LivezProber]:
    with LivezProber(server) as prober:
        yield prober


@pytest.fixture(scope="module")
def solo(server: ServerProcess) -> str:
    """What a neighbour is answered where nobody attacks."""
    return greedy(server)


def ids(count: int, each: bytes = b"123") -> bytes:
    return b"[" + b",".join([each] * count) + b"]"


def tops(n: int, max_new_tokens: int, **fields: object) -> bytes:
    return orjson.dumps(
        {
            "text": "The mill",
            "return_logprob": True,
            "top_logprobs_num": 1000,
            "sampling_params": {"n": n, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            **fields,
        }
    )


def tools(count: int, num_properties: int) -> list[dict[str, object]]:
    properties = {f"p{at}": {"type": "string", "description": "x"} for at in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"tool_{at}", "parameters": parameters}}
        for at in range(count)
    ]


def chat(messages: list[dict[str, object]], **fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, "max_tokens": 1, **fields})


def said(content: object, count: int = 1) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}] * count


CHAT = "/v1/chat/completions"
TOO_LONG = b"context length"


@dataclass
class Attack:
    """Requests that are sent at once, and what each is answered."""

    path: str
    body: bytes
    status: int
    says: bytes = b""
    count: int = 1
    media: str = "application/json"


ATTACKS = {
    "generate, 1,000 texts": lambda: Attack(
        "/generate", orjson.dumps({"text": [TEXT] * 1000}), 400, b"at most 33554432 characters"
    ),
    "generate, 500 texts": lambda: Attack(
        "/generate", orjson.dumps({"text": [TEXT] * 500}), 400, b"longer than the model's context"
    ),
    "completions, 1,000 texts": lambda: Attack(
        "/v1/completions",
        orjson.dumps({"prompt": [TEXT] * 1000}),
        400,
        b"at most 33554432 characters",
    ),
    "completions, 100 texts": lambda: Attack(
        "/v1/completions", orjson.dumps({"prompt": [TEXT] * 100}), 400, b"longer than the model's"
    ),
    "tokenize, 1,000 texts": lambda: Attack(
        "/tokenize", orjson.dumps({"prompt": [TEXT] * 1000}), 400, b"at most 8388608 characters"
    ),
    "tokenize, 130 texts": lambda: Attack(
        "/tokenize", orjson.dumps({"prompt": [TEXT] * 130}), 200, b'{"tokens":[['
    ),
    "score, a long query for each of 4,000 items": lambda: Attack(
        "/v1/score",
        orjson.dumps({"query": TEXT, "items": ["a"] * 4000, "label_token_ids": [1, 2]}),
        400,
        b"at most 33554432 characters together, got 240060000",
    ),
    "score, 4,000 items": lambda: Attack(
        "/v1/score",
        orjson.dumps({"query": "The mill", "items": ["a"] * 4000, "label_token_ids": [1, 2]}),
        200,
        b'"scores":[[',
    ),
    "select, a long prompt for each of 1,000 choices": lambda: Attack(
        "/v1/select",
        orjson.dumps({"text": TEXT, "choices": ["a"] * 1000}),
        400,
        b"at most 33554432 characters together, got 60",
    ),
    "select, 1,000 choices": lambda: Attack(
        "/v1/select",
        orjson.dumps({"text": "The mill", "choices": [f" {n} oats" for n in range(1000)]}),
        200,
        b'"token_logprobs":[[',
    ),
    "detokenize, 10 million ids": lambda: Attack(
        "/detokenize",
        b'{"tokens":' + ids(10_000_000, b"12") + b"}",
        400,
        b"at most 8388608 numbers",
    ),
    "detokenize, a million ids": lambda: Attack(
        "/detokenize", b'{"tokens":' + ids(1_000_000) + b"}", 200, b'{"text":'
    ),
    "generate, 32 million ids": lambda: Attack(
        "/generate",
        b'{"input_ids":' + ids(32_000_000, b"1") + b"}",
        400,
        b"at most 8388608 numbers",
    ),
    "generate, a million ids": lambda: Attack(
        "/generate",
        b'{"input_ids":' + ids(1_000_000) + b"}",
        400,
        b"longer than the model's context",
    ),
    "generate, 8 million ids in lists": lambda: Attack(
        "/generate",
        b'{"input_ids":' + ids(2700, ids(3000)) + b"}",
        400,
        b"longer than the model's context",
    ),
    "generate, 4,000 short texts": lambda: Attack(
        "/generate",
        orjson.dumps(
            {
                "text": ["a b c"] * 4000,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": 1},
            }
        ),
        200,
        b'[{"text":',
    ),
    "generate, 2 million log-probabilities three times": lambda: Attack(
        "/generate", tops(64, 30), 200, b'[{"text":', count=3
    ),
    "generate, a cumulative stream of 2 million": lambda: Attack(
        "/generate", tops(64, 30, stream=True), 200, b"data: {"
    ),
    "chat, 130,000 log-probabilities": lambda: Attack(
        "/v1/chat/completions",
        orjson.dumps(
            {
                "messages": [{"role": "user", "content": "hi"}],
                "logprobs": True,
                "top_logprobs": 20,
                "n": 64,
                "max_tokens": 100,
                "ignore_eos": True,
            }
        ),
        200,
        b'{"id":',
    ),
    "chat, 900 tools of 20 properties, eight times": lambda: Attack(
        CHAT, chat(said("hi"), tools=tools(900, 20)), 400, TOO_LONG, count=8
    ),
    "chat, 900 tools, one of them to be called": lambda: Attack(
        CHAT, chat(said("hi"), tools=tools(900, 20), tool_choice="required"), 400, TOO_LONG
    ),
    "chat, 1,000 tools and 2,000 messages, 20 times": lambda: Attack(
        CHAT, chat(said("x" * 20, 2000), tools=tools(1000, 1)), 400, TOO_LONG, count=20
    ),
    "chat, 200,000 messages": lambda: Attack(CHAT, chat(said("x", 200_000)), 400, TOO_LONG),
    "chat, 4,096 parts": lambda: Attack(
        CHAT, chat(said([{"type": "text", "text": "y" * 15_000}] * 4096)), 400, TOO_LONG
    ),
    "responses, 900 tools": lambda: Attack(
        "/v1/responses",
        orjson.dumps(
            {
                "model": "m",
                "input": "hi",
                "tools": [{"type": "function", **each["function"]} for each in tools(900, 20)],  # type: ignore[dict-item]
            }
        ),
        400,
        TOO_LONG,
        count=4,
    ),
    "messages, 200,000": lambda: Attack(
        "/v1/messages",
        orjson.dumps(
            {
                "model": "m",
                "max_tokens": 16,
                "messages": [*said("x"), {"role": "assistant", "content": "x"}] * 100_000,
            }
        ),
        400,
        b"prompt is too long",
    ),
    "messages, 4,096 blocks": lambda: Attack(
        "/v1/messages",
        orjson.dumps(
            {
                "model": "m",
                "max_tokens": 16,
                "messages": said([{"type": "text", "text": "y" * 15_000}] * 4096),
            }
        ),
        400,
        b"prompt is too long",
    ),
    "files, 40 MB of newlines": lambda: Attack(
        "/v1/files",
        b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        + b"\n" * 40_000_000
        + b"\r\n--X--\r\n",
        200,
        b'"object":"file"',
        media="multipart/form-data; boundary=X",
    ),
    "chat, 2,000 messages": lambda: Attack(
        "/v1/chat/completions",
        orjson.dumps({"messages": [{"role": "user", "content": "x" * 2000}] * 2000}),
        400,
        b"longer than the model's context",
    ),
}


# These take the same way as another attack, and differ in the endpoint or the number of pieces.
ALIKE = {
    "completions, 1,000 texts": "generate, 1,000 texts",
    "completions, 100 texts": "generate, 500 texts",
    "tokenize, 1,000 texts": "generate, 1,000 texts",
    "score, a long query for each of 4,000 items": "generate, 1,000 texts",
    "select, a long prompt for each of 1,000 choices": "generate, 1,000 texts",
    "generate, a million ids": "generate, 8 million ids in lists",
    "responses, 900 tools": "chat, 900 tools of 20 properties, eight times",
    "messages, 4,096 blocks": "chat, 4,096 parts",
    "chat, 2,000 messages": "chat, 200,000 messages",
}
assert ALIKE.keys() | {*ALIKE.values()} <= ATTACKS.keys()


def send(server: ServerProcess, attack: Attack) -> tuple[int, bytes, int]:
    """Status, beginning and size of the answer, which is read to its end and not kept."""
    headers = {"content-type": attack.media}
    with httpx.stream(
        "POST", server.url + attack.path, content=attack.body, headers=headers, timeout=240
    ) as response:
        begin, size = b"", 0
        for part in response.iter_raw():
            begin = begin if len(begin) > 1024 else begin + part[:2048]
            size += len(part)
    return response.status_code, begin, size


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in ATTACKS],
)
def test_livez_answers_and_streams_keep_their_text(
    server: ServerProcess, prober: LivezProber, solo: str, name: str
) -> None:
    attack = ATTACKS[name]()
    found = []
    for _ in range(NUM_TRIES):
        with (
            Neighbours(server) as neighbours,
            prober.period() as period,
            ThreadPoolExecutor(attack.count) as pool,
        ):
            answers = list(pool.map(lambda _: send(server, attack), range(attack.count)))
        for status, begin, _ in answers:
            assert status == attack.status, begin
            assert attack.says in begin
        assert set(neighbours.texts) == {solo}
        # Once a machine may have stopped.
        if period.is_bearable:
            return
        found.append(str(period))
    pytest.fail(f"/livez took {', '.join(found)}")


@pytest.mark.timeout(300)
def test_large_bodies_leave_no_memory(server: ServerProcess) -> None:
    names = ("generate, 8 million ids in lists", "chat, 4,096 parts", "chat, 200,000 messages")
    before = resident_kb(server.process.pid)
    with ThreadPoolExecutor(4) as pool:
        for name in names:
            attack = ATTACKS[name]()
            found = list(pool.map(lambda _, sent=attack: send(server, sent), range(6)))
            assert {status for status, _, _ in found} == {attack.status}
    until(lambda: resident_kb(server.process.pid) < before + 150 * 1024)
