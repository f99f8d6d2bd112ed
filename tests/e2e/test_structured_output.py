"""Structured output over HTTP: every kind, hostile ones beside streams, a killed compiler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import httpx
import psutil
import pytest

from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.native import queues
from tests.support.processes import alive, command
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

pytestmark = needs_grammars

WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["word", "ok"],
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<w>", "schema": WORD, "end": "</w>"}],
    "triggers": ["<w"],
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(backend: str) -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--model-path", str(tiny_model("qwen3"))),
        *("--enable-metrics", "--grammar-backend", backend),
    ) as made:
        yield made.wait_ready()


def generate(server: ServerProcess, **sampling: Any) -> httpx.Response:
    body = {"text": "water", "sampling_params": {"max_new_tokens": 80, **sampling}}
    return server.client.post("/generate", json=body)


def output(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["finish_reason"]["type"] == "stop", response.text
    return str(response.json()["text"])


def test_every_kind(server: ServerProcess) -> None:
    # Random weights write anything: what comes out was made by the constraint alone.
    # They love blanks, too: four places for at most 32 each leave room for the rest.
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["wheel", "mill", 7]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    value = json.loads(
        output(
            generate(server, json_schema=json.dumps(schema), temperature=1.0, max_new_tokens=230)
        )
    )
    assert list(value) == ["word"]
    assert value["word"] in ("wheel", "mill", 7)
    assert re.fullmatch("[0-9]{4}-[a-f]{2}", output(generate(server, regex="[0-9]{4}-[a-f]{2}")))
    assert output(generate(server, ebnf='root ::= "left" | "right"')) in ("left", "right")
    tag = {"type": "tag", "begin": "<w>", "content": {"type": "const_string", "value": "x"}}
    tagged = json.dumps({"type": "structural_tag", "format": {**tag, "end": "</w>"}})
    assert output(generate(server, structural_tag=tagged)) == "<w>x</w>"
    assert generate(server, structural_tag=json.dumps(TAG)).status_code == 200
    many = generate(server, regex="[0-9]{4}", n=3, temperature=1.0).json()
    assert all(re.fullmatch("[0-9]{4}", each["text"]) for each in many)
    assert generate(server, regex="", json_schema="", max_new_tokens=2).status_code == 200


def test_one_constraint_only(server: ServerProcess) -> None:
    response = generate(server, regex="a", json_schema="{}")
    assert response.status_code == 400
    assert "Only one constraint" in response.text


# llguidance computes nothing ahead, and so can follow these: it gets them where xgrammar has said
# in time that it cannot.
ONLY_SLOW_TO_COMPILE: list[dict[str, str]] = [
    {"regex": ".{1,4000}.{1,4000}"},
    {"ebnf": 'root ::= a a a a a a a a a a "b"\na ::= b*\nb ::= c*\nc ::= [a-z]*'},
]
HOSTILE: list[dict[str, str]] = [
    {"regex": "(a+)+b"},
    {"regex": "(a|a){1,5000}"},
    {"regex": "a" * 1_000_000},
    {"regex": "(" * 30_000},
    {"regex": "(" * 30_000 + ")" * 30_000},
    {"regex": "(?<=a)b"},
    {"regex": "["},
    {"regex": "(a"},
    {"ebnf": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    {"ebnf": 'root ::= "a'},
    {"ebnf": 'other ::= "a"'},
    {"json_schema": '{"type": 5}'},
    {"json_schema": '{"type": "string", "pattern": 7}'},
    {"json_schema": '{"type": "string", "pattern": "(?=a)"}'},
    {"json_schema": '{"not": {}}'},
    {"json_schema": "{"},
    {"json_schema": "false"},
    {"json_schema": '{"a":' * 10_000},
    {"json_schema": json.dumps({"properties": {f"p{i}": {} for i in range(10_000)}})},
    {"json_schema": json.dumps({"enum": list(range(100_000))})},
    {"json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}'},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "nosuch"}}'},
    {"structural_tag": '{"structures": 5}'},
]


def hostile(backend: str, constraints: list[dict[str, str]]) -> list[dict[str, str]]:
    return constraints + (ONLY_SLOW_TO_COMPILE if backend == "xgrammar" else [])


def settled(server: ServerProcess, body: bytes) -> tuple[httpx.Response, float]:
    """An answer that says what the grammar is like, and the seconds that it took.

    A busy machine may not get round to finding that out, and says so.
    """
    for _ in range(10):
        started = time.perf_counter()
        response = server.client.post("/generate", content=body)
        took_s = time.perf_counter() - started
        if response.status_code != 503:
            break
    return response, took_s


@pytest.mark.alone
def test_hostile_grammars_are_refused(server: ServerProcess, backend: str) -> None:
    # The compiler is all there once it has answered.
    output(generate(server, regex="a"))
    for constraint in hostile(backend, HOSTILE):
        body = {"text": "water", "sampling_params": constraint}
        response, took_s = settled(server, json.dumps(body).encode())
        (name,) = constraint
        if constraint in ONLY_SLOW_TO_COMPILE and response.status_code == 200:
            continue
        assert response.status_code == 400, (constraint[name][:60], response.text)
        assert name in response.json()["error"]["message"], response.text
        # Two seconds on a machine of its own; this one may be shared.
        assert took_s < 4.0, (constraint[name][:60], took_s)
    assert output(generate(server, regex="[0-9]{3}"))


WORST: list[dict[str, str]] = [
    {"regex": "(a+)+b"},
    {"regex": "a" * 1_000_000},
    {"ebnf": 'root ::= "' + "a" * 1_000_000 + '"'},
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"ebnf": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
]


class Gaps(NamedTuple):
    """Between tokens: what 99 of a hundred are within, and the longest."""

    p99_s: float
    worst_s: float


class Streams:
    """Sixteen endless streams, and how long each of their tokens came after the one before."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._gaps_s: list[float] = []
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()))

    async def _read_all(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(self._read(client, index) for index in range(16)))

    async def _read(self, client: httpx.AsyncClient, index: int) -> None:
        sampling = {"max_new_tokens": 220, "ignore_eos": True, "temperature": 1.0}
        body = {"text": f"wheel {index}", "stream": True, "sampling_params": sampling}
        while not self._stopping:
            async with client.stream("POST", f"{self._url}/generate", json=body) as events:
                last = 0.0
                async for line in events.aiter_lines():
                    now = time.perf_counter()
                    if line.startswith("data: {"):
                        # The first token of a new request has waited for its prompt.
                        if last:
                            self._gaps_s.append(now - last)
                        last = now

    def gaps(self, during: Callable[[], object]) -> Gaps:
        """Those while `during` runs."""
        self._gaps_s = []
        during()
        gaps_s = sorted(self._gaps_s)
        return Gaps(p99_s=gaps_s[len(gaps_s) * 99 // 100], worst_s=gaps_s[-1])

    def calm(self) -> Gaps:
        """Those of a time in which nothing else is sent."""
        return self.gaps(lambda: time.sleep(CALM_S))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()


def never_seen(constraints: list[dict[str, str]], number: int) -> list[bytes]:
    """Requests for them with an end of their own: an answer from before would cost nothing.

    As bytes, since making them would keep the reader of the streams waiting.
    """
    ends = {"regex": f"z{number}", "ebnf": f'\nz{number} ::= "z"'}
    made = [{kind: text + ends[kind]} for each in constraints for kind, text in each.items()]
    return [json.dumps({"text": "water", "sampling_params": each}).encode() for each in made]


@pytest.mark.alone
def test_nobody_notices_hostile_grammars(server: ServerProcess, backend: str) -> None:
    # Some pass every limit, and are found out only by being compiled or tried.
    worst = hostile(backend, WORST)
    generate(server, regex="a")
    tries: list[tuple[Gaps, Gaps, float]] = []
    with Streams(server) as streams:
        # All have begun after that.
        streams.calm()
        while (quiet := quiet_tries(tries)) < NUM_QUIET:
            assert len(tries) < MAX_TRIES, f"{quiet} quiet of {tries}"
            bodies = never_seen(worst, len(tries))
            took_s: list[float] = []

            def attack(bodies: list[bytes] = bodies, took_s: list[float] = took_s) -> None:
                for body, constraint in zip(bodies, worst, strict=True):
                    response, answered_s = settled(server, body)
                    is_followed = constraint in ONLY_SLOW_TO_COMPILE and len(BACKENDS) > 1
                    assert response.status_code == 400 or is_followed
                    took_s.append(answered_s)
                    time.sleep(max(0.0, ATTACK_EVERY_S - answered_s))

            disturbed = streams.gaps(attack)
            tries.append((disturbed, streams.calm(), max(took_s)))


# The front reads what is sent, a megabyte in some ten milliseconds: how often is the attacker's.
ATTACK_EVERY_S = 0.8
# Some six hundred gaps of the sixteen streams.
CALM_S = 0.5
# Compiling what is slow to compile takes four times as long.
STALL_S = 0.25
# A grammar that is compiled or tried where tokens are made stalls the streams at every try. A
# machine that others use, too, stalls them now and then, with and without an attack: with five busy
# processes on two cores half of the tries were lost. So a few must be quiet, not most; and what is
# calm is a median, so that a stall in it excuses no other try.
NUM_QUIET = 1
MAX_TRIES = 20


def quiet_tries(tries: list[tuple[Gaps, Gaps, float]]) -> int:
    """How many attacks were answered in time, and let nearly no gap grow by half and none stall.

    Of each the gaps with the attack, those without, and the seconds that its longest answer took.
    """
    if not tries:
        return 0
    bound_s = 1.5 * statistics.median(calm.p99_s for _, calm, _ in tries)
    return sum(
        disturbed.p99_s <= bound_s and disturbed.worst_s < STALL_S and longest_s < 2.0
        for disturbed, _, longest_s in tries
    )


def test_a_stall_at_every_attack_is_noticed() -> None:
    quiet, slow = Gaps(0.012, 0.1), Gaps(0.03, 0.1)
    calm, chance = Gaps(0.01, 0.05), Gaps(0.09, 0.9)
    # One calm time that is long by chance excuses nothing.
    assert quiet_tries([(slow, calm, 0.1)] * 8 + [(slow, chance, 0.1)]) == 0
    assert quiet_tries([(quiet, calm, 0.1)] * 3 + [(slow, calm, 0.1)] * 6) == 3
    assert quiet_tries([(quiet, calm, 2.1), (quiet, calm, 0.1), (quiet, calm, 0.1)]) == 2
    assert quiet_tries([(Gaps(0.012, 0.3), calm, 0.1), (quiet, calm, 0.1)]) == 1


def compiler_pid(server: ServerProcess) -> int:
    for pid in server.child_pids():
        if command(pid)[-1:] == ["grammar"]:
            return pid
    raise AssertionError("no grammar process")


def test_a_killed_compiler_is_started_again(server: ServerProcess) -> None:
    output(generate(server, regex="[a-c]{3}"))
    first = compiler_pid(server)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first))
    # What was compiled before needs no compiler; what is new starts one.
    output(generate(server, regex="[a-c]{3}"))
    output(generate(server, regex="[d-f]{3}"))
    assert compiler_pid(server) != first
    os.kill(compiler_pid(server), signal.SIGSTOP)
    answers: list[httpx.Response] = []
    waiter = threading.Thread(
        target=lambda: answers.append(generate(server, regex="[g-i]{3}", temperature=1.0))
    )
    waiter.start()
    until(lambda: queues(server)["grammar"] == 1)
    assert "num_grammar_queue_reqs" in server.client.get("/metrics").text
    os.kill(compiler_pid(server), signal.SIGKILL)
    waiter.join()
    assert re.fullmatch("[g-i]{3}", output(answers[0]))


def test_an_abort_reaches_a_request_that_waits_for_its_grammar(server: ServerProcess) -> None:
    output(generate(server, regex="x"))
    pid = compiler_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        answers: list[httpx.Response] = []
        body = {"text": "a", "rid": "waits", "sampling_params": {"regex": "never{7}"}}
        waiter = threading.Thread(
            target=lambda: answers.append(server.client.post("/generate", json=body))
        )
        waiter.start()
        until(lambda: queues(server)["grammar"] == 1)
        server.client.post("/abort_request", json={"rid": "waits"})
        waiter.join(60)
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        os.kill(pid, signal.SIGCONT)
    output(generate(server, regex="never{7}"))


def test_what_the_machine_had_no_time_for_may_be_sent_again(server: ServerProcess) -> None:
    output(generate(server, regex="x"))
    compiler = psutil.Process(compiler_pid(server))
    with ThreadPoolExecutor(1) as pool:
        for number in range(100):
            constraint = {"regex": f"[a-z]{{3}}{number}", "temperature": 1.0}
            answer = pool.submit(generate, server, **constraint)
            while not stop_fork_of(compiler) and not answer.done():
                pass
            # It may have said all when it was stopped.
            if (refused := answer.result()).status_code == 503:
                break
    assert "too busy to compile the regex" in refused.json()["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert re.fullmatch(f"[a-z]{{3}}{number}", output(generate(server, **constraint)))


def stop_fork_of(process: psutil.Process) -> bool:
    for fork in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            fork.suspend()
            return fork.status() == psutil.STATUS_STOPPED
    return False


def test_without_a_backend_it_says_so() -> None:
    off = running_server("qwen3", "--grammar-backend", "none")
    response = off.client.post("/generate", json={"text": "a", "sampling_params": {"regex": "a"}})
    assert response.status_code == 400
    assert "--grammar-backend" in response.text
    chat = off.client.post(
        "/v1/completions",
        json={"model": "m", "prompt": "a", "response_format": {"type": "json_object"}},
    )
    assert chat.status_code == 400


def test_a_grammar_as_guidance_sends_it(server: ServerProcess) -> None:
    lark = '%llguidance {"no_forcing": false}\nstart: "the " WORD " is " %json {"enum": [4, 16]}\n'
    answer = generate(server, ebnf=f"{lark}WORD: /[a-z]{{2,4}}/\n", temperature=0)
    if "llguidance" not in BACKENDS:
        assert answer.status_code == 400
        assert "for --grammar-backend llguidance" in answer.text
        return
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(r"the [a-z]{2,4} is (4|16)", answer.json()["text"])
    for broken in ("%llguidance {}\nstart: nothing\n", "%llguidance {\nstart: 'a'\n"):
        assert generate(server, ebnf=broken).status_code == 400


@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs both libraries")
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        # One library drops the first and refuses the second, the other misses or refuses the rest.
        ({"type": "number", "multipleOf": 2.5, "minimum": 2, "maximum": 4}, "2.5"),
        ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 4, "multipleOf": 1.5}, "3"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "9007199254740993"),
        ({"type": "string", "pattern": "^\\.$", "not": {"type": "null"}}, '"."'),
    ],
)
def test_a_schema_goes_to_the_library_that_can(
    server: ServerProcess, schema: dict[str, Any], expected: str
) -> None:
    text = output(generate(server, json_schema=json.dumps(schema), max_new_tokens=40))
    assert text.rstrip("0").rstrip(".") == expected.rstrip("0").rstrip(".")
    refused = generate(server, json_schema=json.dumps({"type": "array", "contains": schema}))
    assert refused.status_code == 400
    assert "'contains' is not supported" in refused.text
