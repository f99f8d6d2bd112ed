"""Files and batches through the official client, against real servers; one of them is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

OVER = ("completed", "failed", "expired", "cancelled")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def ask(name: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {name}"}]
    return line(name, CHAT, **{"messages": messages, "temperature": 0, "max_tokens": 4} | fields)


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def submit(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    until(lambda: client.batches.retrieve(batch.id).status in OVER, what=batch.id)
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(tiny_model("qwen3"))) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def test_a_batch_answers_as_the_route_does(server: ServerProcess, client: Any) -> None:
    bad = ask("bad", temperature=-1)
    content = jsonl(*(ask(f"name{index}") for index in range(5)), bad)
    batch = submit(client, content, metadata={"who": "me"})
    assert batch.object == "batch"
    assert batch.status in ("validating", "in_progress")
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = ended(client, batch)
    assert (done.status, done.metadata) == ("completed", {"who": "me"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    answers = lines_of(client, done.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"name{index}" for index in range(5)]
    assert len({each["id"] for each in answers}) == 5
    for each in answers:
        assert set(each) == {"id", "custom_id", "response", "error"}
        assert each["id"].startswith("batch_req_")
        assert each["error"] is None
        assert set(each["response"]) == {"status_code", "request_id", "body"}
        asked = ask(each["custom_id"])["body"]
        direct = server.client.post(CHAT, json=asked).json()
        body = each["response"]["body"]
        assert body["choices"] == direct["choices"]
    assert done.usage.output_tokens == sum(
        each["response"]["body"]["usage"]["completion_tokens"] for each in answers
    )
    (failed,) = lines_of(client, done.error_file_id)
    assert failed["custom_id"] == "bad"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    described = client.files.retrieve(done.output_file_id)
    assert (described.purpose, described.status) == ("batch_output", "processed")
    assert described.bytes == len(client.files.content(done.output_file_id).content)


@pytest.mark.parametrize(
    ("url", "body", "words"),
    [
        (TEXT, {"prompt": "One two", "max_tokens": 3}, "text_completion"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, "response"),
    ],
)
def test_other_endpoints(client: Any, url: Any, body: dict[str, Any], words: str) -> None:
    done = ended(client, submit(client, jsonl(line("a", url, **body)), url))
    (answer,) = lines_of(client, done.output_file_id)
    assert answer["response"]["body"]["object"] == words
    assert done.usage.total_tokens > 3
    assert done.error_file_id is None


def test_input_that_is_no_batch_fails(client: Any) -> None:
    content = (
        jsonl(ask("a"), ask("a"), line("b", TEXT, prompt="x"))
        + b"not json\n\n[1]\n"
        + jsonl({**ask("c"), "method": "GET"}, ask("d", stream=True), {**ask("e"), "custom_id": 1})
    )
    failed = ended(client, submit(client, content))
    assert failed.status == "failed"
    found = [(error.line, error.code) for error in failed.errors.data]
    assert found == [
        (2, "duplicate_custom_id"),
        (3, "mismatched_url"),
        (4, "invalid_json_line"),
        (6, "invalid_json_line"),
        (7, "invalid_method"),
        (8, "invalid_body"),
        (9, "invalid_custom_id"),
    ]
    assert failed.output_file_id is None
    empty = ended(client, submit(client, b"\n"))
    assert empty.errors.data[0].code == "empty_file"


def test_files(server: ServerProcess, client: Any) -> None:
    content = bytes(range(256)) * 2000
    made = [
        client.files.create(
            file=(f"{name}.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        for name in ("a", "ü", "c")
    ]
    assert made[1].filename == "ü.jsonl"
    assert made[0].expires_at == made[0].created_at + 3600
    assert client.files.content(made[0].id).content == content
    newest = client.files.list(limit=2, purpose="batch")
    assert [file.id for file in newest.data] == [made[2].id, made[1].id]
    assert newest.has_more
    every = [file.id for file in client.files.list(limit=1, order="asc")]
    assert [each for each in every if each in {file.id for file in made}] == [f.id for f in made]
    assert client.files.delete(made[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made[0].id)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=made[0].id, endpoint=CHAT, completion_window="24h")
    assert server.client.get("/v1/files", params={"after": "file-no"}).status_code == 400


def test_cancel(client: Any) -> None:
    # Far more than is done before the answer to the request is there.
    slow = {"max_tokens": 200, "ignore_eos": True}
    batch = submit(client, jsonl(*(ask(f"n{index}", **slow) for index in range(500))))
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    with pytest.raises(openai.BadRequestError, match="still reads"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert done.cancelling_at <= done.cancelled_at
    answers = lines_of(client, done.output_file_id)
    assert 0 < len(answers) == done.request_counts.completed < 500
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)
    newer = submit(client, jsonl(ask("a")))
    listed = client.batches.list(limit=1)
    assert listed.data[0].id == newer.id
    assert listed.has_more
    assert [each.id for each in listed][:2] == [newer.id, batch.id]


def test_a_batch_survives_a_kill(tmp_path: Path) -> None:
    options = ("--model-path", str(tiny_model("qwen3")), "--file-store", str(tmp_path))
    asked = [ask(f"n{index}", max_tokens=100, ignore_eos=True) for index in range(60)]
    with ServerProcess(*options) as first:
        client = client_of(first.wait_ready())
        batch = submit(client, jsonl(*asked))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
        before = client.batches.retrieve(batch.id)
        first.signal(signal.SIGKILL)
        first.wait_exit()
    assert before.status == "in_progress"
    with ServerProcess(*options) as second:
        client = client_of(second.wait_ready())
        # Nobody else has the folder meanwhile.
        third = ServerProcess(*options)
        assert third.wait_exit() == 1
        assert "another server uses it" in third.log
        done = ended(client, batch)
        assert done.status == "completed"
        assert done.created_at == before.created_at
        assert done.request_counts.completed == 60
        answers = lines_of(client, done.output_file_id)
        assert [each["custom_id"] for each in answers] == [each["custom_id"] for each in asked]
        assert client.files.content(batch.input_file_id).content == jsonl(*asked)


def test_an_orderly_end_does_not_wait_for_batches(tmp_path: Path) -> None:
    options = ("--model-path", str(tiny_model("qwen3")), "--file-store", str(tmp_path))
    asked = [ask(f"n{index}", max_tokens=200, ignore_eos=True) for index in range(300)]
    with ServerProcess(*options) as first:
        client = client_of(first.wait_ready())
        batch = submit(client, jsonl(*asked))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        first.signal()
        assert first.wait_exit() == 0
    with ServerProcess(*options) as second:
        client = client_of(second.wait_ready())
        left = client.batches.retrieve(batch.id)
        assert 0 < left.request_counts.completed < 300
        assert left.status == "in_progress"
        # None of them was cut short by the end of the server.
        assert client.batches.cancel(batch.id)
        kept = lines_of(client, ended(client, batch).output_file_id)
        assert {each["response"]["body"]["usage"]["completion_tokens"] for each in kept} == {200}


def test_forms_are_bounded(server: ServerProcess) -> None:
    def upload(**parts: Any) -> httpx.Response:
        return server.client.post("/v1/files", files=parts)

    file = ("a.jsonl", b"{}")
    good = {"file": file, "purpose": (None, "batch")}
    assert upload(**good).status_code == 200
    for parts, word in (
        ({"file": file}, "purpose"),
        ({**good, "purpose": (None, "assistants")}, "purpose"),
        ({"purpose": (None, "batch")}, "file"),
        ({**good, "file": (None, b"{}")}, "no field"),
        ({**good, "more": (None, "x")}, "no field"),
        ({**good, "purpose": (None, b"\xff")}, "UTF-8"),
        ({**good, "purpose": (None, "x" * 70_000)}, "at most"),
        ({**good, "file": ("x" * 300, b"")}, "filename"),
        ({**good, "expires_after[seconds]": (None, "3600")}, "expires_after"),
        ({f"f{index}": (None, "x") for index in range(40)}, "parts"),
    ):
        answer = upload(**parts)
        assert answer.status_code == 400, parts
        assert word in answer.json()["error"]["message"]
    for kind, body in (
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\n"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"'),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: text/plain\r\n\r\na\r\n--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A" * 9000),
    ):
        answer = server.client.post("/v1/files", content=body, headers={"content-type": kind})
        assert answer.status_code == 400, (kind, body)
