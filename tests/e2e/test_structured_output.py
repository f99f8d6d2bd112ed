"""Structured output over HTTP: every kind, hostile ones beside streams, a killed compiler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import httpx
import psutil
import pytest

from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.native import queues, slowed
from tests.support.processes import alive, command, engine_processes
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


class Spent(NamedTuple):
    """The processor time of each process, in seconds; waiting for a busy machine adds nothing.

    `grammar_s` includes the forks of the compiler that have ended.
    """

    front_s: float
    scheduler_s: float
    detokenizer_s: float
    grammar_s: float


class Meter:
    """Measures what the processes of a server spend."""

    def __init__(self, server: ServerProcess) -> None:
        pids = engine_processes(server.process.pid)
        self._others = [
            psutil.Process(pid)
            for pid in (server.process.pid, pids["scheduler"], pids["detokenizer"])
        ]
        self._grammar = psutil.Process(compiler_pid(server))

    def _now(self) -> Spent:
        others = (each.cpu_times() for each in self._others)
        # User and system time, then those of the children that have ended.
        grammar_s = sum(self._grammar.cpu_times()[:4])
        return Spent(*(each.user + each.system for each in others), grammar_s)

    def spent(self, during: Callable[[], object]) -> Spent:
        """Return what is spent while `during` runs."""
        before = self._now()
        during()
        return Spent(*(now - then for now, then in zip(self._now(), before, strict=True)))


def settled(
    server: ServerProcess,
    meter: Meter,
    body: bytes,
    after: Callable[[], object] = lambda: None,
    *,
    num_tries: int = 10,
) -> tuple[httpx.Response, Spent]:
    """Return the answer that says what the grammar is like, and what it and `after` took.

    A busy machine may have no time to find that out, and says so.
    """
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.client.post("/generate", content=body, timeout=120))
        after()

    for _ in range(num_tries):
        spent = meter.spent(ask)
        if answers[-1].status_code != 503:
            break
    return answers[-1], spent


# A fork may compile for 1.8 seconds; beyond that, a constraint costs next to nothing.
REFUSED_S = 3.0


def test_hostile_grammars_are_refused(server: ServerProcess, backend: str) -> None:
    # The compiler is all there once it has answered.
    output(generate(server, regex="a"))
    meter = Meter(server)
    for constraint in hostile(backend, HOSTILE):
        body = json.dumps({"text": "water", "sampling_params": constraint}).encode()
        response, spent = settled(server, meter, body)
        (name,) = constraint
        if constraint in ONLY_SLOW_TO_COMPILE and response.status_code == 200:
            continue
        assert response.status_code == 400, (constraint[name][:60], response.text)
        assert name in response.json()["error"]["message"], response.text
        assert sum(spent) < REFUSED_S, (constraint[name][:60], spent)
    assert output(generate(server, regex="[0-9]{3}"))


WORST: list[dict[str, str]] = [
    {"regex": "(a+)+b"},
    {"regex": "a" * 1_000_000},
    {"ebnf": 'root ::= "' + "a" * 1_000_000 + '"'},
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"ebnf": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
]
# One that is followed: it, too, is compiled elsewhere.
ORDINARY = {"regex": "[a-z]{1,30}"}


class Streams:
    """Four endless streams of slowed steps, and the number of tokens that they have made."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self.num_tokens = 0
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all()))

    async def _read_all(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(self._read(client, index) for index in range(4)))

    async def _read(self, client: httpx.AsyncClient, index: int) -> None:
        sampling = {"max_new_tokens": 220, "ignore_eos": True, "temperature": 1.0}
        body = {"text": f"wheel {index}", "stream": True, "sampling_params": sampling}
        while not self._stopping:
            async with client.stream("POST", f"{self._url}/generate", json=body) as events:
                async for line in events.aiter_lines():
                    self.num_tokens += line.startswith("data: {")
                    if self._stopping:
                        return

    def wait_for(self, num_tokens: int) -> None:
        """Wait until so many more tokens are made."""
        last = self.num_tokens + num_tokens
        until(lambda: self.num_tokens >= last, what="the streams stand still")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()


def never_seen(constraint: dict[str, str], number: int) -> bytes:
    """Return a request for it with an end of its own: what is known already costs nothing."""
    ends = {"regex": f"z{number}", "ebnf": f'\nz{number} ::= "z"'}
    ((kind, text),) = constraint.items()
    sampling = {kind: text + ends[kind], "max_new_tokens": 2}
    return json.dumps({"text": "water", "sampling_params": sampling}).encode()


def test_nobody_notices_hostile_grammars(server: ServerProcess, backend: str) -> None:
    # Some pass every limit, and are found out only by being compiled or tried.
    generate(server, regex="a")
    # Beside what makes tokens, it gets the processor only where nobody else needs it.
    compiler = psutil.Process(compiler_pid(server))
    assert compiler.nice() > psutil.Process(server.process.pid).nice()
    meter, numbers = Meter(server), itertools.count()
    # Slowed, the processes have little to do, so that what is added stands out.
    with slowed(server), Streams(server) as streams:
        # All have begun after that.
        streams.wait_for(40)
        calm = calm_rate([meter.spent(lambda: streams.wait_for(100)) for _ in range(3)], 100)
        for constraint in [*hostile(backend, WORST), ORDINARY]:
            tries: list[Spent] = []
            while not (tries and is_quiet(tries[-1])):
                assert len(tries) < MAX_TRIES, (str(constraint)[:60], calm, tries)
                body, first = never_seen(constraint, next(numbers)), streams.num_tokens
                # Any answer will do where a library may follow it, also that the machine is busy.
                is_open = constraint in ONLY_SLOW_TO_COMPILE and len(BACKENDS) > 1
                # The streams go on, and nothing is left for later.
                response, spent = settled(
                    server,
                    meter,
                    body,
                    lambda: streams.wait_for(8),
                    num_tries=1 if is_open else 10,
                )
                expected = (
                    (200, 400, 503) if is_open else (200,) if constraint is ORDINARY else (400,)
                )
                assert response.status_code in expected, response.text
                tries.append(added(spent, calm, streams.num_tokens - first))


# Of each process. What the front reads, a megabyte, takes 0.03 s, and a step 3 ms; a grammar that
# is slow to compile takes 0.3 s and more.
ADDED_S = 0.15
# A grammar that is compiled or tried where it must not be costs its time in each of them.
MAX_TRIES = 4


def calm_rate(calm: list[Spent], num_tokens: int) -> Spent:
    """Return the seconds for each token, from several times in which `num_tokens` were made.

    The least of each process: what is spent by chance excuses nothing.
    """
    return Spent(*(min(seconds) / num_tokens for seconds in zip(*calm, strict=True)))


def added(spent: Spent, calm: Spent, num_tokens: int) -> Spent:
    """Return what was spent beyond what the tokens cost at other times."""
    return Spent(*(now - rate * num_tokens for now, rate in zip(spent, calm, strict=True)))


def is_quiet(attack: Spent) -> bool:
    """Whether an attack took nothing from the streams' processes, and was soon dealt with."""
    *others, grammar_s = attack
    return max(others) < ADDED_S and grammar_s < REFUSED_S


def test_a_compilation_at_an_attack_is_noticed() -> None:
    chance, usual = Spent(0.5, 0.09, 0.02, 0.0), Spent(0.02, 0.06, 0.01, 0.0)
    calm = calm_rate([usual, chance, usual], 100)
    # A calm time that takes long by chance excuses nothing.
    assert calm == Spent(0.0002, 0.0006, 0.0001, 0.0)
    # A megabyte that is read, and 2 s of steps, on a machine of half the speed.
    assert is_quiet(added(Spent(0.1, 0.2, 0.04, 1.9), calm, 160))
    for compiled in (Spent(0.33, 0.1, 0.0, 0), Spent(0.0, 0.4, 0.0, 0), Spent(0.0, 0.1, 0.3, 0)):
        assert not is_quiet(added(compiled, calm, 160))
    assert not is_quiet(added(Spent(0.0, 0.1, 0.0, 3.1), calm, 160))


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
        # Nobody else waits with it.
        assert generate(server, max_new_tokens=8).status_code == 200
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
