"""Ray Serve: replicas that are killed and added, replicas on two machines of Ray; Ray Data."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import psutil
import pytest

from benchmarks.wire_streams import Reading, Stream, differences, read, streams
from tests.clients.scenarios import CAPITAL, MODEL, need
from tests.support.server import free_port, python_path
from tests.support.waiting import until

ray = need("ray", "ray")

from ray._common.utils import import_attr  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import ActorDiedError  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

from headrace.ray.deployment import (  # noqa: E402
    PREFIX_ROUTER,
    PREFIX_ROUTER_OPTIONS,
    TARGET_SHARE,
    Http,
    replicas_wanted,
)
from headrace.ray.http_call import HttpCall  # noqa: E402
from headrace.ray.replica import Replica  # noqa: E402

ENGINE = {"model_path": "demo-toy", "num_threads": 1, "max_running_requests": 64}
# In 16 bits, sums over two ranks round otherwise than those of one process.
SERVER = {**ENGINE, "allow_open_admin": True, "dtype": "float32"}
CHAT = {
    "model": MODEL,
    "temperature": 0,
    "messages": [{"role": "user", "content": CAPITAL}],
    "stream": True,
}
MACHINE = {"object_store_memory": 200 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """What Ray takes for a machine with 16 cores; tests may add others."""
    os.environ["PYTHONPATH"] = python_path()
    first = {"num_cpus": 16, "num_gpus": 1, "include_dashboard": False, **MACHINE}
    cluster = Cluster(initialize_head=True, head_node_args=first)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    from ray import serve

    from headrace.ray import build_app

    port = free_port()
    # Each machine would have a proxy at the same port of this one.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(SERVER, num_replicas=2), name="headrace", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def content(text: str) -> str:
    """The text of a streamed chat, which must have come to its end."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]", text
    chunks = [orjson.loads(each) for each in events[:-1]]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def ask(url: str) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=120)
    return content(answer.raise_for_status().text)


def replica_pids() -> list[int]:
    """The actors that have an engine, by what Ray calls their processes."""
    return pids_of(r"ray::ServeReplica:headrace:Headrace\b(?!Ingress)")


def pids_of(title: str) -> list[int]:
    """The processes of this test's cluster whose command line begins with a match of `title`.

    An earlier run that was killed may have left a cluster of the same names.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if re.match(title, " ".join(process.cmdline())):
                found.append(process.pid)
    return found


def test_every_api_is_served(url: str) -> None:
    assert "Paris" in ask(url)
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4}}
    assert httpx.post(f"{url}/generate", json=body).json()["text"]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": 3})
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.post(f"{url}/v1/chat/completions", content=b'{"a\xff').status_code == 400
    # Several replicas: one of them would lose its cache, or have other weights.
    flushed = httpx.post(f"{url}/flush_cache")
    assert flushed.status_code == 404
    assert "num_replicas=1" in flushed.json()["error"]["message"]


def test_the_prefix_router_has_limits() -> None:
    """It takes the options with which it spreads load and forgets; by default it does neither."""
    router = import_attr(PREFIX_ROUTER)
    takes = inspect.signature(router.initialize_state)
    assert takes.bind(router, **PREFIX_ROUTER_OPTIONS).kwargs.keys() <= takes.parameters.keys()
    assert takes.parameters["imbalanced_threshold"].default == math.inf
    assert takes.parameters["do_eviction"].default is False


def test_why_rays_own_server_is_not_used() -> None:
    """docs/ray.md: it needs another engine's package, and an engine has nine methods."""
    for package in ("vllm", "sglang"):
        assert importlib.util.find_spec(package) is None
    with pytest.raises(ImportError, match="Neither vLLM nor SGLang"):
        importlib.import_module("ray.serve.llm")
    engine = import_attr("ray.llm._internal.serve.core.engine.protocol.LLMEngine")
    assert len(engine.__abstractmethods__) == 9
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    assert all(f"`{name}`" in page for name in engine.__abstractmethods__)


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [([0, 0], 1), ([10, 4], 1), ([10, 20], 2), ([300, 20], 15), ([], 2)],
)
def test_autoscaling_asks_for_rows_that_hold_the_requests(
    requests: list[float], wanted: int
) -> None:
    def series(values: list[float]) -> dict[int, list[SimpleNamespace]]:
        # Of several values of a replica the newest counts.
        old = SimpleNamespace(value=99.0)
        return {i: [old, SimpleNamespace(value=value)] for i, value in enumerate(values)}

    metrics = {"num_requests": series(requests), "max_running_requests": series([32, 32])}
    context: Any = SimpleNamespace(raw_metrics=metrics, target_num_replicas=2)
    found, _ = replicas_wanted(context)
    assert found == wanted
    assert found * TARGET_SHARE * 32 >= sum(requests)


class Dying:
    """Takes the place of Ray's handle: a replica that dies after some pieces of each answer."""

    def __init__(self, replica: Replica, lives: list[int]) -> None:
        """Give `lives[i]` pieces to the attempt `i` at an answer, and all to later ones."""
        self._replica = replica
        self._lives = lives
        self.num_attempts = 0

    def remote(self, call: HttpCall) -> Pieces:
        life = self._lives[self.num_attempts] if self.num_attempts < len(self._lives) else None
        self.num_attempts += 1
        return Pieces(self._replica.answer(call), life)


class Pieces:
    def __init__(self, pieces: AsyncGenerator[Any, None], life: int | None) -> None:
        self._pieces = pieces
        self._life = life

    async def __aiter__(self) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._pieces):
            num_given = 0
            async for piece in self._pieces:
                if num_given == self._life:
                    raise ActorDiedError()
                num_given += 1
                yield piece

    def cancel(self) -> None:
        pass


async def answer(replica: Replica, stream: Stream, lives: list[int]) -> tuple[Reading, str]:
    """Read a stream through an ingress; also return its text."""
    app = Http(Dying(replica, lives), has_one_replica=False, max_resumes=2)
    reading, taken = Reading(), []

    async def keep(response: httpx.Response) -> None:
        taken.append((await response.aread()).decode())

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://ray",
        event_hooks={"response": [keep]},
    ) as client:
        await read(client, stream, reading)
    return reading, taken[0]


async def num_resumed(replica: Replica) -> float:
    """How many requests went on, rather than being computed again."""
    app = Http(Dying(replica, []), has_one_replica=False, max_resumes=2)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ray") as client:
        lines = (await client.get("/metrics")).text.splitlines()
    (line,) = [each for each in lines if each.startswith("sglang:num_resumed_requests_total{")]
    return float(line.rpartition(" ")[2])


def names(text: str) -> set[str]:
    """The ids of answers and of calls, and when they were made."""
    return set(re.findall(r'"(?:id|call_id|item_id|created)": ?"?([\w-]+)', text))


async def test_an_answer_goes_on_wherever_its_replica_dies() -> None:
    """Answers of all APIs, each event cut off from the next once."""
    replica = Replica.__new__(Replica)
    await replica.__init__(SERVER)  # type: ignore[misc]
    try:
        for stream in streams(18, 16, has_grammars=True):
            undisturbed, text = await answer(replica, stream, [])
            assert not undisturbed.error
            num_named = len(names(text))
            for life in range(12):
                disturbed, text = await answer(replica, stream, [life, life + 2])
                assert differences([undisturbed], [disturbed]) == [], (stream, life)
                assert len(names(text)) == num_named, text
        assert await num_resumed(replica) > 0
        # One death too many.
        cut, _ = await answer(replica, streams(1, 16, has_grammars=True)[0], [3, 3, 3])
        assert "send the request again" in cut.error
    finally:
        await replica.__del__()


def test_32_streams_with_a_replica_killed_and_one_added(url: str) -> None:
    """No request fails: an answer that had begun goes on at another replica."""
    from ray import serve

    from headrace.ray import build_app

    expected = ask(url)
    is_over = threading.Event()
    outcomes: dict[str, int] = {"right": 0, "cut": 0, "wrong": 0}

    def stream(number: int) -> None:
        while not is_over.is_set():
            try:
                text = ask(url)
            except (AssertionError, httpx.HTTPError):
                outcomes["cut"] += 1
            else:
                outcomes["right" if text == expected else "wrong"] += 1

    with ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(stream, number) for number in range(32)]
        try:
            until(lambda: outcomes["right"] > 64, timeout_s=120)
            before = replica_pids()
            assert len(before) == 2
            os.kill(before[0], signal.SIGKILL)
            serve.run(build_app(SERVER, num_replicas=3), name="headrace", route_prefix="/")
            until(lambda: len(replica_pids()) == 3, timeout_s=120)
            # Also those that were sent to the new replicas.
            answered = outcomes["right"]
            until(lambda: outcomes["right"] > answered + 64, timeout_s=120)
        finally:
            is_over.set()
        for each in streams:
            each.result()
    assert outcomes["wrong"] == 0
    assert outcomes["cut"] == 0
    assert ask(url) == expected


def tokens(url: str, index: int, began: Callable[[], object] = int) -> list[int]:
    """Stream an answer of 60 tokens; return all of them. `began` is called at the first ones."""
    body = {
        "text": f"{index} The miller opens the gate,",
        "sampling_params": {
            "max_new_tokens": 60,
            "temperature": index % 2,
            "sampling_seed": index,
            "ignore_eos": True,
        },
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = next(lines)
        began()
        *_, last, done = [first, *lines]
    assert done == "data: [DONE]"
    return list(orjson.loads(last.removeprefix("data: "))["output_ids"])


def machines() -> list[list[str]]:
    """For each placement group in use, the machine of each bundle."""
    groups = placement_group_table().values()
    return [[*g["bundles_to_node_id"].values()] for g in groups if g["state"] == "CREATED"]


@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
def test_a_replica_on_two_machines(cluster: Cluster, url: str, size: str) -> None:
    """Its tokens are those of one process, also if an actor or a machine of the group is lost."""
    from ray import serve

    from headrace.ray import build_app

    with ThreadPoolExecutor(4) as pool:
        expected = [*pool.map(partial(tokens, url), range(4))]
        # The second machine has no cores, so the ingress is on the first one. The engine finds no
        # GPU and computes on the CPU.
        seconds = [cluster.add_node(num_cpus=0, num_gpus=1, **MACHINE)]
        engine = {**SERVER, "nnodes": 2, size: 2}
        two = build_app(engine, num_replicas=1, num_cpus=0, num_gpus=1)
        serve.run(two, name="two", route_prefix="/two")
        two_url = f"{url}/two"
        assert [*pool.map(partial(tokens, two_url), range(4))] == expected
        (before,) = machines()
        assert before[0] != before[1]

        def under_load(fault: Callable[[], None]) -> None:
            began = threading.Event()
            streams = [pool.submit(tokens, two_url, index, began.set) for index in range(4)]
            assert began.wait(60)
            fault()
            assert [each.result() for each in streams] == expected

        def move() -> None:
            cluster.remove_node(seconds.pop(), allow_graceful=False)
            seconds.append(cluster.add_node(num_cpus=0, num_gpus=1, **MACHINE))

        (node,) = pids_of("ray::Node")
        under_load(lambda: os.kill(node, signal.SIGKILL))
        under_load(move)
        (after,) = machines()
        assert after[0] == before[0]
        assert after[1] not in before
        (leader,) = pids_of(r"ray::ServeReplica:two:Headrace\b(?!Ingress)")
        (node,) = pids_of("ray::Node")
        under_load(lambda: os.kill(leader, signal.SIGKILL))
        assert pids_of("ray::Node") != [node]
        serve.delete("two")
    until(lambda: not pids_of("ray::Node") and not machines(), timeout_s=30)
    cluster.remove_node(seconds.pop())


def test_prompts_of_a_dataset_are_answered_as_by_headrace_batch(
    cluster: Cluster, tmp_path: Path
) -> None:
    import ray.data

    from headrace.ray import Answers

    prompts = [f"The capital of country {number} is" for number in range(1000)]
    sampling = {"temperature": 0, "max_new_tokens": 6}
    dataset = ray.data.from_items([{"prompt": each} for each in prompts])
    answered = dataset.map_batches(
        Answers, fn_constructor_args=(ENGINE, sampling), concurrency=2, batch_size=125, num_cpus=1
    )
    found = {row["prompt"]: row["answer"] for row in answered.take_all()}

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [orjson.dumps({"text": each, "sampling_params": sampling}) for each in prompts]
    source.write_bytes(b"\n".join(lines))
    command = [sys.executable, "-m", "headrace.cli", "batch", str(source), str(target)]
    command += ["--model-path", "demo-toy", "--num-threads", "1"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": python_path()})
    rows: list[dict[str, Any]] = [orjson.loads(each) for each in target.read_bytes().splitlines()]
    texts = {prompts[row["index"]]: row["text"] for row in rows}
    assert found == texts
