"""Ten causes of a slow request, put in on purpose, and each named by `headrace explain`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.survival import children
from tests.support.adapters import make_adapter
from tests.support.native import slowed
from tests.support.pictures import data_url, encoded, noise
from tests.support.seeing_model import seeing_model
from tests.support.server import ServerProcess
from tests.support.stalled_file import stalled
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

# The context of the tiny model, too.
POOL_TOKENS = 256
# So much longer takes a step where a request must run until a test has looked at it.
STEP_S = 0.02
# How long at least a disk stalls.
STALL_S = 0.2
# Tokens of the answer that prompts delay, and how many of them come before the first such prompt.
NUM_BESIDE, NUM_ALONE = 400, 50
OF_CLIENTS = ("slow reader", "slow sender")
RULES = "You are the guide of a museum. Answer in one short sentence, and name the hall. " * 12


class Asked:
    """A server, and requests that differ in everything but what is put in."""

    def __init__(self, *options: str) -> None:
        self.server = ServerProcess(*options, "--skip-server-warmup").wait_ready()
        self.adapters: dict[str, Path] = {}
        self._first_id = 20

    def ids(self, count: int) -> list[int]:
        """Token ids that no earlier prompt has begun with."""
        self._first_id += 1
        return [self._first_id, *(30 + 7 * each % 200 for each in range(count - 1))]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.server.client.post(path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, rid: str, ids: list[int], num_tokens: int, **body: Any) -> None:
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        self.post("/generate", rid=rid, input_ids=ids, sampling_params=sampling, **body)

    def chat(self, content: Any, system: str = "", **body: Any) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        asked = {"model": "m", "messages": messages, "max_tokens": 1, **body}
        return str(self.post("/v1/chat/completions", **asked)["id"])

    def explain(self, name: str) -> dict[str, Any]:
        """The one request of that name; its stages are all of its time."""
        (found,) = self.post("/explain_request", id=name)["requests"]
        total = sum(stage["ms"] for stage in found["stages"])
        assert total == pytest.approx(found["total_ms"], abs=0.1)
        return dict(found)

    def causes(self, name: str) -> dict[str, str]:
        """The text of each cause that is named."""
        return {cause["name"]: cause["text"] for cause in self.explain(name)["causes"]}

    def is_decoding(self, num_running: int = 1) -> bool:
        """Whether that many requests run, and no prompt waits."""
        (load,) = self.server.client.get("/v1/loads").json()["loads"]
        return bool(load["num_running_reqs"] == num_running)


@pytest.fixture(scope="module")
def seeing() -> Iterator[Asked]:
    """One that sees, and has templates and grammars."""
    asked = Asked("--model-path", str(seeing_model()), "--page-size", "16")
    yield asked
    asked.server.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """One with a small pool, and with two adapters, of which one fits."""
    folder, root = tiny_model("llama"), tmp_path_factory.mktemp("adapters")
    adapters = {each: make_adapter(root / each, folder, 8, 1) for each in ("one", "two")}
    paths = [f"{name}={path}" for name, path in adapters.items()]
    asked = Asked(
        *("--model-path", str(folder), "--page-size", "16"),
        *("--max-total-tokens", str(POOL_TOKENS), "--lora-paths", paths[0]),
        *("--max-loras-per-batch", "1", "--max-loaded-loras", "1", "--max-lora-rank", "8"),
    )
    asked.adapters = adapters
    asked.post("/load_lora_adapter", lora_name="two", lora_path=str(adapters["two"]))
    yield asked
    asked.server.stop()


@pytest.fixture
def slowly(small: Asked) -> Iterator[Asked]:
    with slowed(small.server, STEP_S):
        yield small


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_cold_cache(seeing: Asked) -> None:
    # What a server does for its first request only would be seen instead of the prompt.
    seeing.chat("Good morning.")
    name = seeing.chat("Where is the lion?", "This begins like nothing else. " + RULES)
    found = seeing.explain(name)
    # A busy machine delays this test as well, which is then a slow client.
    causes = [each["name"] for each in found["causes"] if each["name"] not in OF_CLIENTS]
    assert causes[0] == "cold cache"
    assert found["cached_tokens"] == 0
    assert sum(each["tokens"] for each in found["prompt_chunks"]) == found["prompt_tokens"]
    warm = seeing.chat("Where is the lion?", "This begins like nothing else. " + RULES)
    assert seeing.explain(warm)["cached_tokens"] > 0
    assert "cold cache" not in seeing.causes(warm)


def test_a_changed_system_line(seeing: Asked) -> None:
    rules = RULES + "Today is {}, the museum closes at five. " + RULES
    seeing.chat("Where is the lion?", rules.format("Monday"))
    name = seeing.chat("Where is the lion?", rules.format("Sunday"))
    found = seeing.explain(name)
    assert "changed system line" in {cause["name"] for cause in found["causes"]}
    left = found["prefix"]
    assert (left["kind"], left["in_system"]) == ("differs", True)
    assert left["before"].endswith("Today is")
    assert left["after"].startswith(" Sunday, the museum closes")
    # A new question after the same rules is none of these.
    other = seeing.chat("Is the hall of the whale open?", rules.format("Sunday"))
    assert not seeing.explain(other)["prefix"]["in_system"]
    assert "changed system line" not in seeing.causes(other)


def test_a_large_image(seeing: Asked) -> None:
    url = data_url(encoded(noise(900, 900)))
    name = seeing.chat([{"type": "image_url", "image_url": {"url": url}}])
    found = seeing.explain(name)
    assert "large image" in {cause["name"] for cause in found["causes"]}
    assert found["images"] == 1
    (prompt,) = [stage for stage in found["stages"] if stage["name"] == "prompt"]
    assert prompt["parts"]["images"] > 0


def test_a_grammar(seeing: Asked) -> None:
    names = [f"p{each}" for each in range(40)]
    schema = {
        "type": "object",
        "properties": {each: {"type": "string", "pattern": f"[a-z]+{each}"} for each in names},
        "required": names,
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert "grammar compilation" in seeing.causes(seeing.chat("Hello", response_format=form))


def test_a_long_neighbor(seeing: Asked, clients: ThreadPoolExecutor) -> None:
    is_running = True

    def send_neighbors(client: int) -> None:
        number = 0
        while is_running:
            seeing.generate(f"neighbor-{client}-{number}", seeing.ids(1500), 1)
            number += 1

    # A short sleep, because the time that prompts add is compared with all of the step's time.
    with slowed(seeing.server, STEP_S / 4):
        sampling = {"max_new_tokens": NUM_BESIDE, "ignore_eos": True, "temperature": 0}
        body = {"rid": "beside", "input_ids": seeing.ids(20), "sampling_params": sampling}
        with seeing.server.client.stream("POST", "/generate", json={**body, "stream": True}) as own:
            tokens = (line for line in own.iter_lines() if line.startswith("data: {"))
            # How long a step takes without neighbors: the mean of few would be that of a stall.
            for _ in range(NUM_ALONE):
                next(tokens)
            # Several, so that the next prompt waits already when one is computed.
            sending = [clients.submit(send_neighbors, client) for client in range(3)]
            try:
                for _ in tokens:
                    pass
            finally:
                is_running = False
        for each in sending:
            each.result()
    found = seeing.explain("beside")
    (text,) = [each["text"] for each in found["causes"] if each["name"] == "long neighbor"]
    assert "most of them of request neighbor-" in text
    assert 0 < found["steps_with_prompts"] < found["steps"] == NUM_BESIDE - 1


def test_a_slow_reader(seeing: Asked) -> None:
    # Every event repeats all log-probabilities: more than the buffers of both ends hold.
    body = json.dumps(
        {
            "rid": "unread",
            "input_ids": seeing.ids(20),
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": 20,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", seeing.server.port))
        reader.sendall(head.encode() + body)
        assert reader.recv(12) == b"HTTP/1.1 200"

        def unread() -> float:
            """The share of its time in which the answer waited for the reader."""
            found = seeing.explain("unread")
            waited = sum(each["ms"] for each in found["stages"] if each["name"] == "socket")
            return float(waited / found["total_ms"])

        until(lambda: unread() > 0.2)
        while reader.recv(2**20):
            pass
    found = seeing.explain("unread")
    assert found["outcome"] == "length"
    assert "slow reader" in {cause["name"] for cause in found["causes"]}


def test_a_full_pool(slowly: Asked, clients: ThreadPoolExecutor) -> None:
    running = clients.submit(slowly.generate, "holder", slowly.ids(POOL_TOKENS // 2), 100)
    until(slowly.is_decoding)
    slowly.generate("held", slowly.ids(POOL_TOKENS * 3 // 4), 1)
    running.result()
    assert "full pool" in slowly.causes("held")
    assert "full pool" not in slowly.causes("holder")


def test_a_retraction(slowly: Asked, clients: ThreadPoolExecutor) -> None:
    prompt = POOL_TOKENS * 5 // 16
    names = ("first", "second")
    running: list[Future[None]] = []
    for num_running, name in enumerate(names, 1):
        running.append(
            clients.submit(slowly.generate, name, slowly.ids(prompt), POOL_TOKENS * 10 // 16)
        )
        until(lambda num_running=num_running: slowly.is_decoding(num_running))
    for each in running:
        each.result()
    assert slowly.explain("second")["retractions"] == 1
    assert "retraction" in slowly.causes("second")
    assert slowly.explain("first")["retractions"] == 0


def test_a_slow_disk(small: Asked) -> None:
    for name in ("one", "two"):
        small.generate(f"with {name}", small.ids(20), 1, lora_path=name)
        # It is in memory now.
        small.generate(f"again {name}", small.ids(20), 1, lora_path=name)
        assert "slow disk" not in small.causes(f"again {name}")
    small.generate("from files", small.ids(20), 1, lora_path="one")
    assert "its adapter" in small.causes("from files")["slow disk"]


def test_a_stalled_disk(small: Asked, clients: ThreadPoolExecutor) -> None:
    """The worker waits in the kernel's read of an adapter's file; nothing else is slow."""
    for name in ("one", "two"):
        small.generate(f"before the stall {name}", small.ids(20), 1, lora_path=name)
    with stalled(small.adapters["one"] / "adapter_model.safetensors") as wait_read:
        running = clients.submit(small.generate, "stalled", small.ids(20), 1, lora_path="one")
        assert wait_read() in children(small.server.process.pid, "scheduler")
        since = time.monotonic()
        # Requests that need no file are answered all the while.
        while time.monotonic() - since < STALL_S:
            small.generate("beside the stall", small.ids(20), 1)
        assert not running.done()
        stalled_ms = 1000 * (time.monotonic() - since)
    running.result()
    found = small.explain("stalled")
    (cause,) = [each for each in found["causes"] if each["name"] == "slow disk"]
    assert cause["ms"] >= stalled_ms
    assert cause["text"] == "It waited for files: its adapter."
    (front,) = [stage for stage in found["stages"] if stage["name"] == "front"]
    assert front["parts"]["adapter"] == cause["ms"] <= front["ms"]
    small.generate("after the stall", small.ids(20), 1)
    assert "slow disk" not in small.causes("after the stall")


def test_a_restart(slowly: Asked, clients: ThreadPoolExecutor) -> None:
    running = clients.submit(slowly.generate, "resumed", slowly.ids(20), 60)
    until(slowly.is_decoding)
    (worker,) = children(slowly.server.process.pid, "scheduler")
    os.kill(worker, signal.SIGKILL)
    running.result()
    found = slowly.explain("resumed")
    assert found["resumes"] == 1
    assert found["causes"][0]["name"] == "restart"


def test_the_command_and_its_refusals(seeing: Asked, tmp_path: Path) -> None:
    name = seeing.chat("Where is the whale?")

    def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace.cli", "explain", *arguments]
        return subprocess.run(
            [*command, "--url", seeing.server.url], capture_output=True, text=True, cwd=tmp_path
        )

    table = explain(name)
    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith(f"request  {name} (length): ")
    assert "\nprompt " in table.stdout
    assert json.loads(explain(name, "--json").stdout)["requests"][0]["rid"] == name
    unknown = explain("nothing")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "No request 'nothing' runs" in unknown.stderr
