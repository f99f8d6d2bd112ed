"""Bytes on the socket before HTTP is parsed: odd, huge, slow, or another protocol."""

import select
import socket
import time

import pytest

from tests.support.native import slowed, until_idle, until_running
from tests.support.server import common_server, running_server


@pytest.fixture(scope="module")
def server():
    return common_server()


def talk(server, data: bytes, piece: int = 1 << 20) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), piece):
            connection.sendall(data[start : start + piece])
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 10**6 + b"\r\n\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 10_000 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.0\r\n\r\n", b"200"),
        *(
            (
                b"POST /generate HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n2\r\n{}\r\n0\r\n\r\n" % codings,
                b"400",
            )
            for codings in (
                b"Transfer-Encoding: gzip, chunked",
                b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: identity, chunked",
                b"Transfer-Encoding: chunked, chunked",
                b"Transfer-Encoding: deflate",
            )
        ),
    ],
)
def test_bad_heads_are_answered_and_closed(server, data, status):
    answer = talk(server, data)
    assert answer.split(b" ")[1][:3] == status
    assert server.client.get("/health").status_code == 200


def test_what_waits_is_bounded_unless_an_option_says_how(server):
    assert server.client.get("/server_info").json()["max_queued_requests"] == 16_384


def test_an_idle_connection_outlives_the_pools_of_clients(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        # uvicorn's own limit is five seconds; load balancers keep theirs for sixty.
        connection.settimeout(7)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_bad_heads_leave_no_noise_in_the_log(server):
    # Once this one's line is there, no line of an earlier request is still to come.
    assert server.client.get("/no/such/mark").status_code == 404
    server.wait_for_line("/no/such/mark")
    before = len(server.lines)
    talk(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert server.client.get("/model_info").status_code == 200
    assert all("GET /model_info" in line for line in server.lines[before:])


def test_the_path_cannot_forge_a_log_line(server):
    talk(server, b"GET /a%0d%0aFORGED%1b[31m HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert not any(line.startswith("FORGED") for line in server.lines)
    assert "\x1b" not in server.log


# As Java's client and `curl --http2` send them: HTTP/2 is offered, and the body is sent at once.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
BODY = b'{"prompt": "The wheel turns.", "add_special_tokens": false}'


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("piece", [1, 150, 10_000])
def test_an_offer_of_another_protocol_is_ignored(server, is_chunked, piece):
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + OFFER
    form = b"Content-Length: %d\r\n\r\n%b"
    if is_chunked:
        form = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    request = head + form % (len(BODY), BODY)
    last = b"GET /model_info HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    # Twice on one connection, and another request behind them.
    answer = talk(server, request + request + last, piece)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"tokens":[') == 2
    assert b'"model_path"' in answer


def test_many_offers_at_once(server):
    offer = b"GET /livez HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert talk(server, offer * 2000 + last).count(b"HTTP/1.1 200 OK") == 2001
    assert "Traceback" not in server.log


ADMIN_TARGETS = (
    *(b"/flush_cache", b"/%66lush_cache", b"/flush%5Fcache", b"/flush_cache?x=%0a"),
    *(b"http://127.0.0.1/flush_cache", b"http://x/flush_cache", b"//x@y/flush_cache"),
)
NO_TARGETS = (
    *(b"/flush_cache%0a", b"/flush_cache%0A", b"/flush_cache%0d", b"/flush_cache%0d%0a"),
    *(b"/flush_cache%00", b"/flush_cache%e2%80%a8", b"/flush_cache%c2%85", b"/flush_cache%20"),
    *(
        b"/flush_cache/",
        b"//flush_cache",
        b"/%2fflush_cache",
        b"/flush_cache%2f",
        b"/./flush_cache",
    ),
    *(b"/health/../flush_cache", b"/health/%2e%2e/flush_cache", b"/FLUSH_CACHE", b"/flush_cache;x"),
    *(b"/%2566lush_cache", b"/health%0a/../flush_cache", b"/flush_cache%3fx", b"/./flush_cache"),
    b"*",
)


@pytest.fixture(scope="module")
def keyed():
    return running_server("qwen3", "--api-key", "user", "--admin-api-key", "boss")


@pytest.mark.parametrize("target", [*ADMIN_TARGETS, *NO_TARGETS])
def test_no_spelling_of_an_admin_route_gets_past_its_key(keyed, target):
    def status(*lines: bytes) -> bytes:
        head = [b"POST %b HTTP/1.1" % target, *lines, b"Connection: close", b"", b""]
        return talk(keyed, b"\r\n".join(head)).split(b" ")[1]

    refused = {b"400", b"401", b"403", b"404"}
    for host in (b"Host: x", b"Host: x/health?", b"Host: 127.0.0.1/health#", b"Host: "):
        assert status(host) in refused - {b"404"}
        assert status(host, b"Authorization: Bearer user") in refused
        twice = (b"Authorization: Bearer user", b"Authorization: Bearer boss")
        assert status(host, *twice) in refused - {b"404"}
    if target in ADMIN_TARGETS[:4]:
        assert status(b"Host: x", b"Authorization: Bearer boss") == b"200"


@pytest.mark.parametrize("offer", [b"", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"])
def test_a_tunnel_is_not_opened(server, offer):
    answer = talk(server, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 4")
    assert server.client.get("/health").status_code == 200


def request(body: bytes, version: bytes = b"1.1", path: bytes = b"/generate") -> bytes:
    head = b"POST %b HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n" % (path, version)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def generation(num_tokens: int, stream: bool = False) -> bytes:
    said = b"true" if stream else b"false"
    sampling = b'{"max_new_tokens": %d, "ignore_eos": true}' % num_tokens
    return b'{"text": "The wheel", "stream": %b, "sampling_params": %b}' % (said, sampling)


def half_closed(server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_own_direction_gets_its_answer(server, version, stream):
    answer = half_closed(server, request(generation(24, stream), version))
    # Something without meaning may come before, which every client of 1.1 has to skip.
    interim, final = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n"
    assert answer.removeprefix(interim).startswith(final), answer
    assert version == b"1.1" or not answer.startswith(interim)
    assert b'"completion_tokens":24' in answer
    assert (b"data: [DONE]" in answer) == stream
    # Behind a pipeline nothing is read, yet the end is found.
    twice = half_closed(server, 2 * request(generation(24, stream)))
    assert twice.count(b'"completion_tokens":24') == 2
    until_idle(server)


def test_a_client_that_has_closed_is_told_from_one_that_still_reads(server):
    with slowed(server, 0.1):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(request(generation(230)))
            until_running(server)
        closed_at = time.monotonic()
        until_idle(server)
        # Left alone it takes 23 seconds.
        assert time.monotonic() - closed_at < 12


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked", b"Content-Length: 99999999999"])
def test_what_comes_behind_a_413_is_cut_off(server, head):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answered_at, num_after = 0.0, 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % head)
        connection.setblocking(False)
        answer, deadline = b"", time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                can_read, can_write, _ = select.select([connection], [connection], [], 1)
                if can_read:
                    part = connection.recv(65536)
                    answer += part
                    answered_at = answered_at or time.monotonic()
                    if not part:
                        break
                elif can_write:
                    num_sent = connection.send(chunk)
                    num_after += num_sent if answered_at else 0
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() < deadline, "it reads for ever"
        cut_off_after_s = time.monotonic() - answered_at
    assert answer.startswith(b"HTTP/1.1 413")
    # What lies in the buffers of the system counts as sent.
    assert num_after < 8 * 2**20 + 16 * 2**20
    assert cut_off_after_s < 1.5


def test_a_body_that_nobody_needed_does_not_end_its_connection(server):
    body = b" " * 2**20
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request(body, path=b"/no/such/route")[: -len(body) // 2])
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404")
        connection.sendall(body[: len(body) // 2] + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
