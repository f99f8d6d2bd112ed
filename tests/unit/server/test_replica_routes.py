"""What the routes report about two replicas, and when the server is ready."""

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from runtime.config.options import LoggingArgs
from runtime.config.scheduling_options import SchedulingArgs
from tests.support.fake_server import FakeServer


async def test_every_replica_has_its_own_load(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, dp_size=2)
    first, second = server.context.status.replicas
    first.shared["num_running_reqs"], second.shared["num_running_reqs"] = 2, 3
    second.shared["num_queue_reqs"] = 4
    loads = (await server.client.get("/v1/loads")).json()
    assert loads["dp_rank_count"] == 2
    assert [each["dp_rank"] for each in loads["loads"]] == [0, 1]
    assert [each["num_total_reqs"] for each in loads["loads"]] == [2, 7]
    assert loads["aggregate"]["total_running_reqs"] == 5
    assert loads["aggregate"]["avg_utilization"] == 5 / 16
    one = (await server.client.get("/v1/loads?dp_rank=1")).json()["loads"]
    assert [each["dp_rank"] for each in one] == [1]
    for wrong in ("2", "-1", "x", "0,1"):
        answer = await server.client.get(f"/v1/loads?dp_rank={wrong}")
        assert answer.status_code == 400
        assert "dp_rank must be in [0, 2)" in answer.text
    old = (await server.client.get("/get_load")).json()
    assert [(each["dp_rank"], each["num_reqs"]) for each in old] == [(0, 2), (1, 7)]
    text = (await server.client.get("/v1/loads?format=prometheus")).text
    running = next(
        family
        for family in text_string_to_metric_families(text)
        if family.name == "sglang_num_running_reqs"
    )
    assert {s.labels["dp_rank"]: s.value for s in running.samples} == {"0": 2, "1": 3}


async def test_server_info_has_a_state_for_each(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, dp_size=2)
    server.context.status.replicas[1].shared["gen_throughput"] = 12.0
    info = (await server.client.get("/get_server_info")).json()
    assert info["dp_size"] == 2
    assert [each["last_gen_throughput"] for each in info["internal_states"]] == [0.0, 12.0]


async def test_gauges_tell_replicas_apart_only_where_there_are_several(tmp_path: Path) -> None:
    logging = LoggingArgs(enable_metrics=True)
    for dp_size, ranks in ((1, {None}), (2, {"0", "1"})):
        folder = tmp_path / str(dp_size)
        folder.mkdir()
        server = FakeServer(folder, logging=logging, dp_size=dp_size)
        text = (await server.client.get("/metrics")).text
        seen = {
            (family.name, sample.labels.get("dp_rank"))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        for name in ("num_running_reqs", "token_usage", "engine_restarts", "cache_config_info"):
            assert {rank for each, rank in seen if each == f"sglang:{name}"} == ranks
        assert {rank for each, rank in seen if each == "sglang:e2e_request_latency_seconds"} == {
            None
        }


async def test_ready_while_one_replica_is(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, scheduling=SchedulingArgs(max_queued_requests=2), dp_size=2)
    first, second = server.context.status.replicas

    async def statuses() -> tuple[int, int]:
        ready, alive = [await server.client.get(path) for path in ("/readyz", "/livez")]
        return ready.status_code, alive.status_code

    assert await statuses() == (200, 200)
    first.worker, first.phase = None, "loading_weights"
    assert await statuses() == (200, 200)
    second.shared["num_queue_reqs"] = 2
    assert await statuses() == (503, 200)
    second.shared["num_queue_reqs"] = 0
    second.shared["has_work"] = 1
    second.shared["heartbeat_time"] = time.monotonic() - 301
    # The one that hangs is ended; the other one is on its way, so the process is worth keeping.
    assert await statuses() == (503, 200)
    second.worker = None
    assert await statuses() == (503, 200)
    server.context.status.fatal = "Gone."
    assert await statuses() == (503, 503)


async def test_a_named_replica_is_honoured_on_every_route(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, dp_size=2)
    for rank in (1, 0, 1):
        answer = await server.generate(text="hello", data_parallel_rank=rank)
        assert answer.json()["meta_info"]["dp_rank"] == rank
    bodies = {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a", "model": "fake"},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "model": "fake",
        },
    }
    for path, body in bodies.items():
        for name in ("data_parallel_rank", "routed_dp_rank"):
            good = await server.client.post(path, json={**body, name: 1})
            assert good.status_code == 200, good.text
            wrong = await server.client.post(path, json={**body, name: 2})
            assert wrong.status_code == 400
            assert "data_parallel_rank must be in [0, 2)" in wrong.text
    single = FakeServer(_folder(tmp_path, "single"))
    answer = await single.generate(text="hello", data_parallel_rank=0)
    assert "dp_rank" not in answer.json()["meta_info"]
    assert (await single.generate(text="hello", data_parallel_rank=1)).status_code == 400


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder
