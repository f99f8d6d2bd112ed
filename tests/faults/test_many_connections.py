"""More connections than are served, or than files may be open: probes are still answered."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from server.connection_limit import NUM_SPARE, ConnectionLimit, connections_within
from tests.support.native import generate
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model


@contextlib.contextmanager
def idle_connections(server: ServerProcess, num: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            for _ in range(num)
        ]


def ask(server: ServerProcess, method: str, path: str) -> httpx.Response:
    # A connection of its own, unlike the client's that are kept.
    return httpx.request(method, f"{server.url}{path}", json={} if method == "POST" else None)


@pytest.mark.slow
def test_probes_are_answered_whatever_is_open() -> None:
    # As few files as a front can live with: half of them are its own.
    prefix = ("prlimit", "--nofile=400:400")
    with ServerProcess("--model-path", str(tiny_model("qwen3")), prefix=prefix) as server:
        server.wait_ready()
        most = connections_within(400)
        for num in (most + 8, 3 * 400):
            with idle_connections(server, num):
                for path in ("/livez", "/health", "/readyz"):
                    assert ask(server, "GET", path).status_code == 200
                for path in ("/generate", "/v1/completions", "/no/such/route"):
                    refused = ask(server, "POST", path)
                    assert refused.status_code == 503
                    assert refused.headers["retry-after"]
                    assert refused.headers["connection"] == "close"
                    assert "--max-connections" in refused.text
        assert generate(server, text="The wheel")["text"]
        assert "Traceback" not in server.log


def test_as_many_as_the_option_says() -> None:
    options = ("--max-connections", "4", "--skip-server-warmup")
    with ServerProcess("--model-path", str(tiny_model("qwen3")), *options) as server:
        server.wait_ready()
        with idle_connections(server, 4) as held:
            assert ask(server, "GET", "/model_info").status_code == 503
            assert ask(server, "GET", "/livez").status_code == 200
            held[0].close()
            # Until its end is known the answer is the same.
            for _ in range(100):
                if (answer := ask(server, "GET", "/model_info")).status_code == 200:
                    break
            assert answer.status_code == 200


class Connection:
    is_cut_off = False

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_the_oldest_connection_over_the_limit_makes_way() -> None:
    limit = ConnectionLimit(1)
    served, *spare = (Connection() for _ in range(NUM_SPARE + 2))
    assert not limit.add(served, 1)
    assert all(limit.add(each, 2 + index) for index, each in enumerate(spare))
    assert [each.is_cut_off for each in spare] == [True] + [False] * NUM_SPARE
    limit.discard(spare[1])
    assert limit.add(Connection(), 9)
    assert not spare[2].is_cut_off


@pytest.mark.parametrize("num", [16, 64, 100, 256, 400, 1024, 20_000, 65_536])
def test_some_files_are_left_for_the_server_itself(num: int) -> None:
    most = connections_within(num)
    assert 1 <= most <= num
    assert num < 256 or num - most - NUM_SPARE >= 128
