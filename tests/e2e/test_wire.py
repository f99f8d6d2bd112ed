"""What arrives on the socket before HTTP is understood: odd, huge, slow, or another protocol."""

import socket

import pytest

from tests.support.server import running_server


@pytest.fixture(scope="module")
def server():
    return running_server("qwen3", "--enable-metrics")


def talk(server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
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
    ],
)
def test_bad_heads_are_answered_and_closed(server, data, status):
    answer = talk(server, data)
    assert answer.split(b" ")[1][:3] == status
    assert server.client.get("/health").status_code == 200


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
