"""64 mixed streams whose processes are killed: every byte as undisturbed, and no error."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.survival import DISTURBANCES, Victim, children
from benchmarks.wire_streams import Reading, Stream, differences, streams
from tests.support.grammar_backends import BACKENDS
from tests.support.server import ServerProcess
from tests.support.tiny_models import other_weights, tiny_model

NUM_STREAMS = 64
ONE = ("--max-running-requests", "72")
TWO = ("--dp-size", "2", "--num-threads", "1")


class Served:
    """A server, and what its streams give undisturbed."""

    def __init__(self, *options: str) -> None:
        self.server = ServerProcess(*options, "--skip-server-warmup").wait_ready()
        self.victim = Victim(self.server.url, self.server.process.pid)
        self.wanted: list[Stream] = streams(NUM_STREAMS, 48, has_grammars=bool(BACKENDS))
        self.undisturbed = self.run("nothing")
        assert not [each.error for each in self.undisturbed if each.error]

    def run(self, how: str) -> list[Reading]:
        return asyncio.run(self.victim.run(self.wanted, DISTURBANCES[how]))

    def check(self, how: str) -> None:
        resumed = self.num_resumed()
        found = differences(self.undisturbed, self.run(how))
        assert found == [], self.kernels()
        assert self.num_resumed() > resumed, "nothing was in flight"

    def kernels(self) -> str:
        """Return what the workers logged about their kernels, on which the bits depend."""
        return "\n".join(line for line in self.server.lines if "ernels" in line)

    def num_resumed(self) -> float:
        lines = self.server.client.get("/metrics").text.splitlines()
        (line,) = [each for each in lines if each.startswith("sglang:num_resumed_requests_total{")]
        return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    served = Served(*ONE, "--enable-metrics")
    yield served
    served.server.stop()


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    served = Served(*TWO, "--enable-metrics")
    yield served
    served.server.stop()


@pytest.mark.parametrize("how", ["worker", "detokenizer"])
def test_every_byte_is_as_undisturbed(one: Served, how: str) -> None:
    one.check(how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prompts", "worker-twice", "restart"])
def test_so_it_is_whenever_and_however_often(one: Served, how: str) -> None:
    one.check(how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["worker", "detokenizer", "restart"])
def test_another_replica_takes_over(two: Served, how: str) -> None:
    two.check(how)


@pytest.mark.slow
def test_a_rank_takes_its_worker_along_but_no_stream() -> None:
    model = ("--model-path", str(tiny_model("llama")))
    served = Served(*model, "--tp-size", "2", "--num-threads", "1", "--enable-metrics")
    try:
        served.check("worker")
    finally:
        served.server.stop()


@pytest.mark.slow
def test_other_weights_take_over_the_streams(tmp_path: Path) -> None:
    """The rest of an answer is what the other weights give after its first part."""
    other = other_weights("qwen3", tmp_path / "qwen3")
    sampling = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    prompt = [7, 11, 13, 17]
    with ServerProcess("--model-path", str(tiny_model("qwen3")), "--skip-server-warmup") as server:
        server.wait_ready()

        def ask(ids: list[int], num_tokens: int) -> list[int]:
            body = {"input_ids": ids, "sampling_params": {**sampling, "max_new_tokens": num_tokens}}
            answer = server.client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["output_ids"]

        before = ask(prompt, 120)
        server.client.post("/slow_down", json={"forward_sleep_time": 0.03}).raise_for_status()
        body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
        with server.client.stream("POST", "/generate", json=body, timeout=120) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            next(lines)
            wrong = httpx.post(f"{server.url}/restart_worker", json={"model_path": "no/such"})
            assert wrong.status_code == 400
            version = {"model_path": str(other), "weight_version": "other"}
            done = httpx.post(f"{server.url}/restart_worker", json=version, timeout=120)
            assert done.json() == {"success": True, "message": "The worker was replaced."}
            *_, last = lines
        answer = json.loads(last.removeprefix("data: "))
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert answer["meta_info"]["weight_version"] == "other"
        output = answer["output_ids"]
        assert len(output) == 120
        assert output != before
        num_common = next(
            i for i, pair in enumerate(zip(output, before, strict=True)) if len(set(pair)) > 1
        )
        assert num_common > 0
        # Both may agree on some tokens after the switch, so it lies at the difference or before.
        assert ask([*prompt, *output[:num_common]], 120 - num_common) == output[num_common:]


def test_a_signal_replaces_the_worker() -> None:
    with ServerProcess("--skip-server-warmup") as server:
        server.wait_ready()
        worker = children(server.process.pid, "scheduler")
        server.signal(signal.SIGUSR2)
        server.wait_for_line("The worker was replaced.")
        assert children(server.process.pid, "scheduler") != worker
        body = {"text": "The", "sampling_params": {"max_new_tokens": 4}}
        assert server.client.post("/generate", json=body).status_code == 200
        assert server.client.get("/server_info").json()["num_restarts"] == 0
