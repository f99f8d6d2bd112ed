"""Bodies, request ids, uncaught errors."""

import asyncio
import json

import pytest

from runtime.eventloop import ignored_fields
from server.entry.body_limit import BodyLimit
from server.error_responses import SlowBody
from tests.support.fake_server import FakeServer


async def test_a_declared_size_over_the_limit_is_refused_unread(tmp_path):
    server = FakeServer(tmp_path, max_body_mb=0.001)
    response = await server.client.post("/generate", content=b"x" * 2000)
    assert response.status_code == 413
    assert response.json()["object"] == "error"
    openai = await server.client.post("/v1/completions", content=b"x" * 2000)
    assert openai.status_code == 413
    assert openai.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_grows_over_the_limit_is_cut_off(tmp_path, path):
    server = FakeServer(tmp_path, max_body_mb=0.001)
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 10**7:
            sent += 100
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    response = await server.client.post(path, content=endless(), headers=headers)
    assert response.status_code == 413


async def test_compressed_bodies_are_refused(tmp_path):
    server = FakeServer(tmp_path)
    headers = {"content-encoding": "gzip"}
    assert (await server.client.post("/generate", content=b"x", headers=headers)).status_code == 415


async def test_a_body_that_never_comes_is_given_up():
    async def silent():
        await asyncio.Event().wait()

    receive = BodyLimit(100, timeout_s=0.05).counting(silent)
    with pytest.raises(SlowBody, match="did not arrive"):
        await receive()


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "m"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}], "model": "m"},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "model": "m", "stream": False},
    "/api/show": {"model": "m"},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/v1/rerank": {"query": "a", "documents": []},
    "/abort_request": {"rid": "nobody"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_nobody_reads_are_named(tmp_path, caplog, path):
    ignored_fields.LOGGED.clear()
    server = FakeServer(tmp_path)
    body = {**BODIES[path], "frequncy_penalty": 1, "a, b\r\n": None, "ä": 2}
    for _ in range(2):
        response = await server.client.post(path, json=body)
        # An error names them as well.
        assert response.headers["x-ignored-fields"] == "frequncy_penalty, a%2C%20b%0D%0A, %C3%A4"
    lines = [line.getMessage() for line in caplog.records if "is ignored" in line.getMessage()]
    assert [line.split(":")[0] for line in lines] == [path] * 3
    assert r"'a, b\r\n'" in lines[1]
    assert "x-ignored-fields" not in (await server.client.post(path, json=BODIES[path])).headers


async def test_a_large_body_and_a_stream_name_what_is_ignored(tmp_path):
    server = FakeServer(tmp_path)
    fields = {"text": "a" * 100_000, "stream": True, "strem": True}
    assert (await server.client.post("/generate", json=fields)).headers[
        "x-ignored-fields"
    ] == "strem"
    body = {"prompt": [[1] * 50_000], "max_tokens": 1, "x": {"y": [1] * 10_000}}
    response = await server.client.post("/v1/completions", json=body)
    assert response.headers["x-ignored-fields"] == "x"


async def test_names_of_ignored_fields_are_bounded(tmp_path, caplog):
    ignored_fields.LOGGED.clear()
    server = FakeServer(tmp_path)
    for first in range(0, 3000, 1000):
        names = {f"{first + index}{'日' * 100}": 1 for index in range(1000)}
        response = await server.client.post("/tokenize", json={"prompt": "a", **names})
        header = response.headers["x-ignored-fields"]
        assert len(header) <= 1100
        assert header.endswith(", ...")
    for first in range(1100):
        await server.client.post("/tokenize", json={"prompt": "a", f"n{first}": 1})
    assert len(ignored_fields.LOGGED) == ignored_fields.MAX_LOGGED


async def test_request_ids_are_kept_or_replaced(tmp_path):
    server = FakeServer(tmp_path)

    async def answered(value):
        response = await server.client.get("/livez", headers={"X-Request-Id": value})
        return response.headers["x-request-id"]

    assert await answered("abc.DEF_1-2") == "abc.DEF_1-2"
    for bad in ("", "a b", "x" * 129, '{"a":1}', "a\tb"):
        assert await answered(bad) != bad
    doubled = [("X-Request-Id", "a"), ("X-Request-Id", "b")]
    response = await server.client.get("/livez", headers=doubled)
    assert response.headers["x-request-id"] not in ("a", "b")


async def test_a_crash_is_a_500_that_tells_nothing(tmp_path, monkeypatch, caplog):
    server = FakeServer(tmp_path)

    def explode(*_):
        raise RuntimeError("/secret/path at 0x7f")

    monkeypatch.setattr(server.context.client, "generate", explode)
    response = await server.generate(text="a")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["type"] == "InternalServerError"
    # Who runs the server finds the traceback by what its client was told.
    error_id = response.json()["message"].rpartition(" ")[2].rstrip(".")
    (record,) = [each for each in caplog.records if error_id in each.getMessage()]
    assert "secret" in str(record.exc_info)
    assert (await server.client.get("/health")).status_code == 200


async def test_unknown_routes_and_methods(tmp_path):
    server = FakeServer(tmp_path)
    missing = await server.client.get("/nope")
    assert (missing.status_code, missing.json()) == (
        404,
        {
            "object": "error",
            "message": "Not found: GET '/nope'.",
            "type": "404",
            "param": None,
            "code": 404,
            "detail": "Not Found",
        },
    )
    wrong = await server.client.get("/generate")
    assert (wrong.status_code, wrong.json()["detail"]) == (405, "Method Not Allowed")
    assert wrong.json()["message"] == "Method not allowed: GET '/generate'; allowed are POST, PUT."
    assert wrong.headers["allow"] == "POST, PUT"
    head = await server.client.head("/generate")
    assert (head.status_code, head.headers["allow"]) == (405, "POST, PUT")
    for method, path, status in (("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405)):
        for prefix in ("", "/llm"):
            server = FakeServer(tmp_path, fastapi_root_path="/llm")
            answer = await server.client.request(method, prefix + path)
            assert answer.status_code == answer.json()["code"] == status
            assert answer.json()["error"] == {
                "message": answer.json()["message"],
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/moderations", "/v1/classify"),
        ("/v1/audio/speech", "speech needs another server"),
        ("/v1/uploads/upload_1", "/v1/files"),
        ("/v1/v1/messages", "/v1 comes twice"),
        ("/chat/completions", "is /v1 missing"),
    ],
)
async def test_a_route_of_others_is_answered_with_what_there_is(tmp_path, path, hint):
    server = FakeServer(tmp_path)
    answer = await server.client.post(path, json={})
    assert answer.status_code == 404
    assert hint in answer.json()["message"]
    near = await server.client.post(f"{path}x" if path.count("/") == 2 else "/v1/audiox", json={})
    assert "Note:" not in near.json()["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"a"',
        b"{",
        b'{"text": NaN}',
        b'{"text": "a", "text": "b"}',
        b'{"sampling_params": {"top_k": 1, "top_k": 2}, "text": "a"}',
        b'{"text": "a", "sampling_params": {"temperature": 1e400}}',
        b'{"text": "a", "sampling_params": {"top_k": true}}',
        b'{"text": "a", "sampling_params": {"top_k": ' + b"9" * 5000 + b"}}",
        b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}",
        '{"text": "a"}'.encode("utf-16"),
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a"} x',
    ],
)
async def test_malformed_json_is_a_400(tmp_path, body):
    server = FakeServer(tmp_path)
    response = await server.client.post("/generate", content=body)
    assert response.status_code == 400
    assert response.json()["type"] == "Bad Request"


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/v1/chat/completions"])
async def test_a_client_that_leaves_while_sending_is_no_failure_of_ours(tmp_path, caplog, path):
    server = FakeServer(tmp_path)
    arriving = [{"type": "http.request", "body": b'{"text": "a', "more_body": True}]
    sent = []

    async def receive():
        return arriving.pop() if arriving else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await server.app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send)
    assert sent[0]["status"] == 499
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


HOSTILE = "two\n\x1b[31mé" + "x" * 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": "two"}}),
        ("/generate", {"text": "a", "sampling_params": {HOSTILE: 1}}),
        ("/v1/completions", {"prompt": "a", "model": "m", "logit_bias": {HOSTILE: 1}}),
        ("/v1/completions", {"model": "m"}),
    ],
)
async def test_the_access_log_says_why_a_request_was_refused(tmp_path, caplog, path, body):
    caplog.set_level("INFO", logger="server.access")
    server = FakeServer(tmp_path)
    headers = {"x-request-id": "mine"}
    response = await server.client.post(path, json=body, headers=headers)
    assert response.status_code == 400
    (line,) = [each.getMessage() for each in caplog.records if each.name == "server.access"]
    head, _, reason = line.partition(" ms id=mine ")
    assert head.split()[1:4] == ["POST", path, "400"]
    answer = response.json()
    message = answer.get("error", answer)["message"]
    assert reason[:12] == message[:12] != ""
    assert len(reason) <= 160
    assert reason.isascii()
    assert reason.isprintable()


async def test_the_access_log_of_an_answer_ends_with_its_id(tmp_path, caplog):
    caplog.set_level("INFO", logger="server.access")
    server = FakeServer(tmp_path)
    response = await server.client.get("/get_model_info", headers={"x-request-id": "mine"})
    assert response.status_code == 200
    (line,) = [each.getMessage() for each in caplog.records if each.name == "server.access"]
    assert line.endswith(" ms id=mine")


# As `curl -d` and Python's urllib send it, unless told otherwise.
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ({}, True),
        ({"Content-Type": "application/json; charset=utf-8"}, True),
        ({"Content-Type": "Application/JSON"}, True),
        ({"Content-Type": "application/problem+json"}, True),
        ({"Content-Type": FORM}, True),
        ({"Content-Type": FORM, "User-Agent": "curl/8.14.1"}, True),
        ({"Content-Type": FORM, "User-Agent": "Mozilla/5.0 (X11)"}, False),
        ({"Content-Type": FORM, "Sec-Fetch-Mode": "no-cors"}, False),
        ({"Content-Type": FORM, "Origin": "http://127.0.0.1:30000"}, False),
        ({"Content-Type": "text/plain"}, False),
        ({"Content-Type": "text/plain; x=application/json"}, False),
        ({"Content-Type": "multipart/form-data; boundary=x"}, False),
        ({"Content-Type": "image/png+json"}, False),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
async def test_native_routes_take_json_alone(tmp_path, path, headers, is_taken):
    server = FakeServer(tmp_path)
    sent = {"User-Agent": "test", **headers}
    body = json.dumps({"text": "a", "rid": "r"})
    answer = await server.client.post(path, content=body, headers=sent)
    assert answer.status_code == (200 if is_taken else 415), answer.text
    if not is_taken:
        assert "application/json" in answer.json()["message"]
