"""Hostile requests: each is refused, and other requests are unaffected.

The numbers are those of `docs/reliability.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.grammar_backends import needs_grammars
from tests.support.native import slowed, until_idle, until_running
from tests.support.neighbours import Neighbours, greedy
from tests.support.server import ROOT, ServerProcess
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.waiting import until

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
Probe = tuple[str, Any, str]
# Method, path, headers, content and the status of the answer.
Call = tuple[str, str, dict[str, str], bytes, int]


def sampling(word: str, **params: Any) -> Probe:
    return GENERATE, {"text": "a", "sampling_params": params}, word


def native(word: str, **body: Any) -> Probe:
    return GENERATE, body, word


def raw(text: str, word: str) -> Probe:
    return GENERATE, text.encode(), word


def chat(word: str, content: Any = "a", **fields: Any) -> Probe:
    return CHAT, {"messages": [{"role": "user", "content": content}], **fields}, word


def completion(word: str, **fields: Any) -> Probe:
    return COMPLETIONS, {"prompt": "a", **fields}, word


def part(kind: str, **content: str) -> list[dict[str, Any]]:
    return [{"type": kind, kind: content}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
# Each with a word of its refusal.
PROBES: dict[int, list[Probe]] = {
    4: [
        native("lora_path", text="a", lora_path=path)
        for path in ("/etc", "../../etc", "owner/adapter", ["/etc"])
    ],
    5: [
        native("--disable-radix-cache", input_embeds=[[0.0] * 64]),
        native("--disable-radix-cache", input_embeds=[[[1e39]]]),
        raw('{"input_embeds": [[NaN]]}', "malformed"),
        raw('{"input_embeds": "gASVEAAAAAAAAAA="}', "input_embeds"),
    ],
    9: [
        sampling("json_schema", json_schema='{"type": 5}'),
        sampling("json_schema", json_schema='{"type": "string", "pattern": 7}'),
        sampling("json_schema", json_schema='{"not": {}}'),
        completion("structured_outputs", structured_outputs={"choice": []}),
        chat("tool_choice", response_format=SCHEMA, stream=True, n=3, tools=[TOOL]),
        chat(
            "'type'",
            response_format=SCHEMA,
            stream=True,
            n=3,
            tools=[TOOL],
            tool_choice="none",
        ),
    ],
    10: [
        sampling("n must be", n=10**9),
        sampling("too large", stop=["x"] * 10**6),
        sampling("stop strings", stop=["x"] * 1000),
        native("4096", text=["a"] * 100_000),
        completion("best_of", best_of=10**6),
        completion("n must be", n=10**9),
        completion("prompts", prompt=["a"] * 100_000),
        chat("n must be", n=10**9),
    ],
    11: [
        native("top_logprobs_num", text="a", return_logprob=True, top_logprobs_num=10**9),
        native("top_logprobs_num", text="a", return_logprob=True, top_logprobs_num=-1),
        native("token_ids_logprob", text="a", return_logprob=True, token_ids_logprob=[VOCAB_SIZE]),
        completion("logprobs", logprobs=10**9),
        completion("logprobs", logprobs=-1),
        chat("top_logprobs", logprobs=True, top_logprobs=21),
    ],
    12: [
        sampling("max_new_tokens", max_new_tokens=2**63),
        sampling("max_new_tokens", max_new_tokens=-1),
        sampling("min_new_tokens", max_new_tokens=None, min_new_tokens=10**9),
        sampling("min_new_tokens", max_new_tokens=4, min_new_tokens=5),
        chat("max_tokens", max_tokens=0),
        chat("min_tokens", min_tokens=10**9),
    ],
    13: [
        raw('{"text": "a", "sampling_params": {"temperature": NaN}}', "malformed"),
        raw('{"text": "a", "sampling_params": {"temperature": Infinity}}', "malformed"),
        raw('{"text": "a", "sampling_params": {"temperature": 1e400}}', "sampling_params"),
        sampling("temperature", temperature=-1),
        sampling("top_p", top_p=0),
        sampling("frequency_penalty", frequency_penalty=1e308),
        sampling("repetition_penalty", repetition_penalty=1e308),
        sampling("logit_bias", logit_bias={str(VOCAB_SIZE): 1.0}),
        sampling("logit_bias", logit_bias={"-1": 1.0}),
    ],
    14: [
        native("input_ids", input_ids=[-1]),
        native("input_ids", input_ids=[VOCAB_SIZE]),
        native("input_ids", input_ids=[2**31]),
        native("input_ids", input_ids=[1.5]),
        native("input_ids", input_ids=[]),
        native("input_ids", input_ids=[[1], [[2]]]),
        sampling("stop_token_ids", stop_token_ids=[VOCAB_SIZE]),
        completion("prompt", prompt=[VOCAB_SIZE]),
    ],
    16: [
        chat("rid", rid=""),
        native("rid", text="a", rid=""),
        native("rid", text="a", rid="a\nb"),
        native("rid", text="a", rid="x" * 10**6),
        chat("rid", rid="x" * 10**6),
    ],
    18: [
        native("cache_salt", text="a", cache_salt="x" * 10**6),
        chat("cache_salt", cache_salt="x" * 10**6),
        native("extra_key", text="a", extra_key=["a", "b"]),
    ],
    20: [
        chat("--chat-template", chat_template="{% for i in range(10**9) %}{% endfor %}"),
        chat("chat_template", chat_template_kwargs={"chat_template": "{{ 'a' * 10**10 }}"}),
        chat("chat_template", chat_template_kwargs={"tools": []}),
        chat("chat_template", chat_template_kwargs={"messages": []}),
    ],
    21: [
        native("longer than", text="a" * 10**7),
        native("longer than", text="\U0001f468\u200d\U0001f469" * 200_000),
        native("longer than", text="\0" * 10**6),
        native("longer than", text="<|im_end|>" * 10**6),
        raw('{"text": "\\ud800"}', "not valid JSON"),
    ],
    23: [
        chat("text only", part("image_url", url=url))
        for url in ("http://169.254.169.254/", "http://[::1]/", "file:///etc/passwd")
    ],
    24: [
        chat("text only", part("image_url", url="data:image/png;base64,AAAA")),
        chat("text only", part("input_audio", data="AAAA", format="wav")),
    ],
    27: [
        raw('{"x": ' + "[" * 100_000, "nested too deeply"),
        raw('{"text": "a", "text": "b"}', "twice"),
        raw("{" + ",".join(f'"k{i}": 1' for i in range(10**6)) + "}", "1024 fields"),
        raw('{"text": "a", "sampling_params": {"top_k": ' + "9" * 5000 + "}}", "top_k"),
        raw("[]", "object"),
    ],
}
JSON = {"content-type": "application/json"}
SIMPLE = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'


def grammar(**constraint: str) -> Call:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4, **constraint}}
    return "POST", GENERATE, JSON, json.dumps(body).encode(), 400


def posted(path: str, body: Any, status: int, **headers: str) -> Call:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return "POST", path, {**JSON, **named}, content, status


# Those whose answer is another one than a 400, or that a test without neighbours looks at closely.
OTHERS: dict[int, list[Call]] = {
    3: [
        *(
            posted("/update_weights_from_disk", {"model_path": path}, 400)
            for path in ("../../etc", "/dev/shm/../etc", "/etc/passwd", "owner/model")
        ),
        posted("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVBAAAAA=="]}, 400),
    ],
    6: [
        grammar(regex="(a+)+b"),
        grammar(regex="(a|a){1,5000}"),
        grammar(regex="x" * 10**6),
        grammar(regex="(?<=a)b"),
    ],
    7: [
        grammar(regex="(" * 30_000),
        grammar(json_schema='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}'),
        grammar(json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}})),
        grammar(json_schema=json.dumps({"enum": [*range(100_000)]})),
    ],
    17: [posted(GENERATE, SIMPLE, 200, x_request_id=name) for name in ("x" * 8000, '{"a": 1}')],
    22: [
        posted(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}, 200)
        for text in ("<|im_end|>", "<|im_start|>system\n")
    ],
    26: [
        posted(GENERATE, b" " * (65 * 2**20), 413),
        posted(GENERATE, SIMPLE, 415, content_encoding="gzip"),
    ],
    27: [posted(GENERATE, body, 400) for body in (b"\xff", SIMPLE.decode().encode("utf-16"))],
    28: [posted(GENERATE, SIMPLE, 431, x_long="a" * 10**6)],
    29: [("GET", "/model_info", {"host": host}, b"", 200) for host in ("x/health?", "a b")],
    30: [
        ("POST", path, {}, b"", 404)
        for path in ("/flush_cache%0a", "//flush_cache", "/Flush_cache")
    ],
    33: [posted("/start_profile", {"output_dir": path}, 400) for path in ("../x", "/", "a\nb")],
    34: [("GET", "/a%0d%0a%1b[31mforged", {}, b"", 404)],
    40: [
        posted(
            "/parse_function_call",
            {"text": tag * 20_000, "tools": [TOOL], "tool_call_parser": "hermes"},
            200,
        )
        for tag in ("<tool_call>", "((((")
    ],
    41: [
        posted(GENERATE, SIMPLE, 403, origin="http://evil.example"),
        ("POST", GENERATE, {"content-type": "text/plain"}, SIMPLE, 415),
    ],
}
# What would tell of this machine or of objects in memory.
LEAK = re.compile(r"object at 0x|Traceback|site-packages|\.py\b|/proc/|" + re.escape(str(ROOT)))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    args = ("--model-path", str(tiny_model("qwen3")), "--enable-metrics")
    with ServerProcess(*args) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def solo(server: ServerProcess) -> str:
    return greedy(server)


def post(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=120)


@pytest.mark.parametrize(
    "number", [pytest.param(each, marks=needs_grammars if each == 9 else ()) for each in PROBES]
)
def test_refused_and_unnoticed(server: ServerProcess, solo: str, number: int) -> None:
    with Neighbours(server) as neighbours:
        until_running(server)
        for path, body, word in PROBES[number]:
            answer = post(server, path, body)
            assert answer.status_code == 400, (path, word, answer.text[:300])
            content = answer.json()
            message = content["error"]["message"] if "error" in content else content["message"]
            assert word in message, message
            assert len(answer.text) < 2000
            assert not LEAK.search(answer.text), answer.text
        assert server.client.get("/health").status_code == 200
    assert set(neighbours.texts) == {solo}
    until_idle(server)


@needs_grammars
def test_other_probes_are_answered_and_unnoticed(server: ServerProcess, solo: str) -> None:
    with Neighbours(server) as neighbours:
        until_running(server)
        for number, calls in OTHERS.items():
            for method, path, headers, content, status in calls:
                answer = httpx.request(
                    method, server.url + path, headers=headers, content=content, timeout=120
                )
                assert answer.status_code == status, (number, path, answer.text[:300])
                assert not LEAK.search(answer.text), answer.text
        assert server.client.get("/health").status_code == 200
    assert set(neighbours.texts) == {solo}
    until_idle(server)


@pytest.mark.parametrize("rid", ["", "m", "mine", "mine_", "other"])
def test_an_abort_of_no_exact_name_ends_nobody(server: ServerProcess, solo: str, rid: str) -> None:
    params = {"max_new_tokens": 50, "temperature": 0, "ignore_eos": True}
    body = {"text": "The mill", "rid": "mine-1", "stream": True, "sampling_params": params}
    # It runs still when the abort comes.
    with slowed(server, 0.02), server.client.stream("POST", GENERATE, json=body) as answer:
        lines = answer.iter_lines()
        events = [next(lines)]
        assert post(server, "/abort_request", {"rid": rid}).status_code == 200
        events += [line for line in lines if line]
    assert json.loads(events[-2].removeprefix("data: "))["text"] == solo


def label_values(server: ServerProcess) -> set[str]:
    return set(re.findall(r'\w+="[^"]*"', server.client.get("/metrics").text))


def test_labels_of_the_metrics_are_closed_sets(server: ServerProcess) -> None:
    served = server.client.get("/v1/models").json()["data"][0]["id"]

    def ask(name: str) -> None:
        for method in ("GET", "PUT", "PURGE", "PROPFIND"):
            server.client.request(method, f"/{name}")
        body = {"model": name, "prompt": "a", "max_tokens": 1, "user": name}
        assert post(server, COMPLETIONS, body).status_code == 200
        # No adapter has this name.
        assert post(server, COMPLETIONS, {**body, "model": f"{served}:{name}"}).status_code == 400

    ask("first")
    label_values(server)
    before = label_values(server)
    for number in range(40):
        ask(f"random-{number}")
    assert label_values(server) == before


def test_the_lag_of_the_loop_is_a_metric(server: ServerProcess) -> None:
    def num_turns() -> float:
        text = server.client.get("/metrics").text
        found = re.search(r"^sglang:event_loop_lag_seconds_count\{.*\} (.*)$", text, re.MULTILINE)
        assert found
        return float(found[1])

    first = num_turns()
    until(lambda: num_turns() > first + 2)
