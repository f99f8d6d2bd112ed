"""A stopped worker (SIGSTOP): the server is not ready meanwhile, then the streams continue."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.test_kill import children_by_name, is_ready, restarts
from tests.support.native import slowed, until_running
from tests.support.neighbours import greedy
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until


@pytest.mark.slow
def test_streams_go_on_where_they_stood() -> None:
    args = ("--model-path", str(tiny_model("qwen3")), "--skip-server-warmup")
    with ServerProcess(*args) as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        solo = greedy(server)
        worker = children_by_name(server)["scheduler"]
        with slowed(server, 0.1):
            streams = [pool.submit(greedy, server) for _ in range(4)]
            until_running(server, 4)
            os.kill(worker, signal.SIGSTOP)
            try:
                # Its heart has not beaten for ten seconds.
                until(lambda: not is_ready(server), 60, "a worker that stands still is ready")
                assert server.client.get("/livez").status_code == 200
                assert not any(stream.done() for stream in streams)
            finally:
                os.kill(worker, signal.SIGCONT)
            until(lambda: is_ready(server), 60, "never ready again")
            assert [stream.result(120) for stream in streams] == [solo] * 4
        assert children_by_name(server)["scheduler"] == worker
        assert restarts(server) == 0
