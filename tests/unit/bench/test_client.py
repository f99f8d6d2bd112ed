"""The HTTP client against a server of raw bytes, and the readers of each API."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.bench.backends import BACKENDS, HttpTarget, Wire, first_model
from headrace.bench.load import drive
from headrace.bench.record import BenchRequest, RequestRecord
from headrace.http_stream import HttpClient
from runtime.errors import HeadraceError, StartupError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return CHUNKED + body + b"0\r\n\r\n"


def plain(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def events(*values: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(value).encode() for value in values)


class RawServer:
    """Answers each request with the bytes that `answer` returns; `None` closes at once."""

    def __init__(self, answer: Callable[[str, bytes], bytes | None], piece: int = 1 << 20) -> None:
        self.answer = answer
        self.piece = piece
        self.num_connections = 0
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(size)
                self.heads.append(head)
                if body:
                    self.bodies.append(json.loads(body))
                answer = self.answer(head.split(" ")[1], body)
                if answer is None:
                    break
                for start in range(0, len(answer), self.piece):
                    writer.write(answer[start : start + self.piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"connection: close" in answer:
                    break
        writer.close()


@asynccontextmanager
async def serving(server: RawServer) -> AsyncIterator[RawServer]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_events_come_whole_however_they_are_cut(piece: int) -> None:
    stream = chunked(b"data: one\n", b"\ndata: two\r\n\r\n: comment\n\nda", b"ta:three\n\n")
    async with serving(RawServer(lambda *_: stream, piece)) as server:
        client = HttpClient(server.url, {}, 60.0)
        seen: list[bytes] = []
        for _ in range(2):
            await client.stream("/x", b"{}", lambda _, data: seen.append(data))
        assert seen == [b"one", b"two", b"three"] * 2
        assert server.num_connections == 1
        client.close()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: one\n\n"
    async with serving(RawServer(lambda *_: answer)) as server:
        client = HttpClient(server.url, {}, 60.0)
        seen: list[bytes] = []
        for _ in range(2):
            await client.stream("/x", b"{}", lambda _, data: seen.append(data))
        assert seen == [b"one"] * 2
        assert server.num_connections == 2


async def test_another_status_is_an_error_with_its_text() -> None:
    async with serving(RawServer(lambda *_: plain(b"too  much\n", "503 Busy"))) as server:
        client = HttpClient(server.url, {}, 60.0)
        with pytest.raises(HeadraceError, match="HTTP 503: too much"):
            await client.stream("/x", b"{}", lambda *_: None)
        client.close()


async def test_a_connection_that_breaks_in_an_answer_is_an_error() -> None:
    broken = chunked(b"data: one\n\n")[:-8] + b"connection: close"
    async with serving(RawServer(lambda *_: broken)) as server:
        client = HttpClient(server.url, {}, 60.0)
        with pytest.raises((OSError, HeadraceError)):
            await client.stream("/x", b"{}", lambda *_: None)


async def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    answers = iter([plain(b"a"), None, plain(b"b")])
    async with serving(RawServer(lambda *_: next(answers))) as server:
        client = HttpClient(server.url, {}, 60.0)
        assert await client.call("GET", "/a") == (200, b"a")
        assert await client.call("GET", "/b") == (200, b"b")
        client.close()


async def test_a_server_that_never_answers_is_not_waited_for() -> None:
    async with serving(RawServer(lambda *_: b"")) as server:
        client = HttpClient(server.url, {}, 0.05)
        with pytest.raises(TimeoutError):
            await client.call("GET", "/a")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_a_url_may_end_as_openais_clients_want_it(path: str) -> None:
    async with serving(RawServer(lambda *_: plain(b"ok"))) as server:
        client = HttpClient(server.url + path, {}, 60.0)
        await client.connect()
        await client.call("GET", "/v1/models")
        client.close()
        assert [head.split(" ")[1] for head in server.heads] == ["/v1/models"]
        assert server.num_connections == 1


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://h:99999", "http://h:port"])
def test_no_url(url: str) -> None:
    with pytest.raises(StartupError):
        HttpClient(url, {}, 1.0)


def test_a_header_cannot_begin_another() -> None:
    with pytest.raises(StartupError):
        HttpClient("http://host", {"Authorization": "a\r\nb: c"}, 1.0)


async def ask(backend: str, request: BenchRequest, *values: object, **wire) -> tuple:
    stream = chunked(events(*values) + b"data: [DONE]\n\n")
    async with serving(RawServer(lambda *_: stream)) as server:
        client = HttpClient(server.url, {"Authorization": "Bearer key"}, 60.0)
        target = HttpTarget(client, BACKENDS[backend](), Wire(**wire))
        record = RequestRecord(index=0)
        await target.send(request, record)
        client.close()
        assert "Authorization: Bearer key\r\n" in server.heads[0]
        return record, server.bodies[0], server.heads[0].split(" ")[1]


def native(text: str, count: int, **meta: object) -> dict:
    meta = {"finish_reason": None, "prompt_tokens": 3, "cached_tokens": 1, **meta}
    return {
        "text": text,
        "output_ids": [7] * count,
        "meta_info": {"completion_tokens": count, **meta},
    }


async def test_native_counts_tokens_however_they_are_joined() -> None:
    end = {"type": "length", "length": 6}
    record, body, path = await ask(
        "sglang",
        BenchRequest(input_ids=[1, 2, 3], output_len=6),
        native("a", 1),
        native("ab", 2),
        native("ab", 2),
        native("abcdef", 6, finish_reason=end),
        extra={"rid": "mine"},
    )
    assert path == "/generate"
    assert body["input_ids"] == [1, 2, 3]
    assert body["stream"] is True
    assert body["rid"] == "mine"
    assert body["sampling_params"] == {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    assert record.event_tokens == [1, 1, 4]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (3, 1, 6)
    assert not record.error


async def test_native_abort_and_error_events_fail_the_request() -> None:
    request = BenchRequest(text="x", output_len=6)
    abort = {"type": "abort", "message": "gone"}
    record, *_ = await ask("headrace", request, native("a", 1, finish_reason=abort))
    assert record.error == "gone"
    record, *_ = await ask("headrace", request, native("a", 1), {"error": {"message": "died"}})
    assert record.error == "died"
    record, *_ = await ask("headrace", request)
    assert "no tokens" in record.error


async def test_opening_a_connection_is_a_part_of_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, opened = asyncio.get_running_loop(), []
    connect = loop.create_connection

    async def slowly(*args, **options):
        opened.append(args)
        await asyncio.sleep(0.2)
        return await connect(*args, **options)

    monkeypatch.setattr(loop, "create_connection", slowly)
    answer = events(native("a", 1), native("ab", 2, finish_reason={"type": "length"}))
    answer = plain(answer + b"data: [DONE]\n\n")
    async with serving(RawServer(lambda *_: answer)) as server:
        target = HttpTarget(HttpClient(server.url, {}, 60.0), BACKENDS["headrace"](), Wire())
        request = BenchRequest(text="x", output_len=2)
        records = await drive([(0, 0.0, request), (1, 0.0, request)], target, max_concurrency=1)
        target.client.close()
    assert [record.error for record in records] == ["", ""]
    assert records[0].ttft_s >= 0.2
    assert len(opened) == 1, "the second request has the connection of the first"


def test_openai_is_what_other_benchmarks_call_completions() -> None:
    assert BACKENDS["openai"]().path == BACKENDS["openai-completions"]().path == "/v1/completions"


@pytest.mark.parametrize("backend", ["sglang", "openai-completions"])
async def test_an_answer_that_breaks_off_is_no_answer(backend: str) -> None:
    # Without a length, as a proxy passes it on, the end of the connection is an end in order.
    choices = [{"index": 0, "text": "a", "finish_reason": None}]
    begun = events({**native("a", 1), "choices": choices})
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
    answers = [begun, begun + b"data: [DONE]\n\n", begun + b"data: {nonsense\n\n"]
    errors = []
    for answer in answers:
        async with serving(RawServer(lambda *_, answer=answer: head + answer)) as server:
            target = HttpTarget(HttpClient(server.url, {}, 60.0), BACKENDS[backend](), Wire())
            (record,) = await drive([(0, 0.0, BenchRequest(text="x", output_len=2))], target)
            errors.append(record.error)
    assert errors[0] == "The answer broke off before [DONE]."
    assert not errors[1]
    assert "cannot be read: JSON is malformed" in errors[2]


async def test_completions_take_the_total_from_usage() -> None:
    def piece(text: str, **more: object) -> dict:
        return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}

    record, body, path = await ask(
        "openai-completions",
        BenchRequest(text="x", output_len=5),
        piece("a"),
        piece("bc"),
        piece("", finish_reason="length"),
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}},
        model="m",
    )
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "x", 5)
    assert body["stream_options"] == {"include_usage": True}
    assert record.event_tokens == [1, 1]
    assert (record.output_tokens, record.prompt_tokens) == (5, 2)


async def test_usage_with_every_piece_counts_exactly() -> None:
    def piece(text: str, total: int) -> dict:
        choices = [{"index": 0, "text": text, "finish_reason": None}]
        return {"choices": choices, "usage": {"prompt_tokens": 2, "completion_tokens": total}}

    request = BenchRequest(text="x", output_len=5)
    record, *_ = await ask("openai-completions", request, piece("a", 1), piece("bcde", 5))
    assert record.event_tokens == [1, 4]


async def test_chat_counts_content_reasoning_and_calls() -> None:
    def piece(**delta: object) -> dict:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    record, body, path = await ask(
        "openai-chat",
        BenchRequest(text="Hi", output_len=4),
        piece(role="assistant", content=""),
        piece(reasoning_content="hm"),
        piece(content="a"),
        piece(tool_calls=[{"index": 0}]),
        piece(content=None),
        ignore_eos=False,
    )
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert "ignore_eos" not in body
    # No usage came: the events are the count.
    assert (record.event_tokens, record.output_tokens) == ([1, 1, 1], 3)


async def test_what_an_api_cannot_take_is_said() -> None:
    chat, native_api = BACKENDS["openai-chat"](), BACKENDS["headrace"]()
    with pytest.raises(HeadraceError, match="--tokenizer"):
        chat.body(BenchRequest(input_ids=[1], output_len=1), Wire())
    with pytest.raises(HeadraceError, match="openai-chat"):
        native_api.body(BenchRequest(messages=[], output_len=1), Wire())


async def test_the_first_model_is_found_or_asked_for() -> None:
    body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
    answers = iter([plain(body), plain(b"{}", "404 Not Found")])
    async with serving(RawServer(lambda *_: next(answers))) as server:
        client = HttpClient(server.url, {}, 60.0)
        assert await first_model(client) == "first"
        with pytest.raises(StartupError, match="--model"):
            await first_model(client)
        client.close()
