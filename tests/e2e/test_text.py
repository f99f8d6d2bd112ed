"""Streamed text equals the whole text over HTTP, however tokens cut it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import ServerProcess
from tests.support.tape_model import Tape, write_tape

TEXT = (
    "The mill: 東京へ行きます。日本語のテキスト、한국어 문장도 있어요。"
    "👨‍👩‍👧‍👦 and 👩🏽‍🚀, 🇫🇷🇯🇵🏴󠁧󠁢󠁥󠁮󠁧󠁿, 👍🏽 ❤️‍🔥; "
    "e\u0301a\u0308o\u0302 x\ufe0f — مرحبا بالعالم, שלום, Привет! "
    "नमस्ते दुनिया, สวัสดีชาวโลก. \u200d\u200f\u00a0 tab\tnew\nline \U0010ffff 𝒽𝓮𝓁𝓁𝓸 ﷽ end of the tape."
)
NUM_NEW = 24


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    return write_tape(tmp_path_factory.mktemp("tape"), TEXT)


@pytest.fixture(scope="module")
def server(tape: Tape) -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(tape.folder)) as process:
        yield process.wait_ready()


def params(**changes: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True, **changes}


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def whole_and_streamed(server: ServerProcess, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer in one piece and the streamed text, which only ever grows."""
    whole = server.client.post("/generate", json=body).json()
    streamed = ""
    for event in events(server, "/generate", body):
        assert event["text"].startswith(streamed)
        streamed = event["text"]
    assert event["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    return whole, streamed


def test_every_place_of_the_tape(tape: Tape, server: ServerProcess) -> None:
    assert sum(not tape.is_border(index) for index in range(len(tape.pieces))) > 40
    for start in range(len(tape.pieces) - NUM_NEW - 1):
        body = {"input_ids": [tape.first_id + start], "sampling_params": params()}
        whole, streamed = whole_and_streamed(server, body)
        assert streamed == whole["text"]
        if tape.is_border(start + 1):
            assert streamed == tape.output(start, NUM_NEW)


def test_stop_strings_around_every_border(tape: Tape, server: ServerProcess) -> None:
    for border in range(4, len(tape.pieces) - NUM_NEW, 2):
        start = next(index for index in range(border - 3, 0, -1) if tape.is_border(index + 1))
        text = tape.output(start, NUM_NEW)
        # Where in the text the border lies, or the character that it cuts.
        middle = len(tape.output(start, border - start))
        for stop in {text[max(0, middle - 2) : middle + 2], text[middle : middle + 1]}:
            body = {"input_ids": [tape.first_id + start], "sampling_params": params(stop=[stop])}
            whole, streamed = whole_and_streamed(server, body)
            assert streamed == whole["text"] == text[: text.index(stop)]
            assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_deltas_of_completions(tape: Tape, server: ServerProcess) -> None:
    borders = [i for i in range(len(tape.pieces) - NUM_NEW - 1) if tape.is_border(i + 1)]
    for start in borders[::3]:
        body = {"prompt": [tape.first_id + start], "max_tokens": NUM_NEW, "temperature": 0}
        whole = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        deltas = [event["choices"][0]["text"] for event in events(server, "/v1/completions", body)]
        assert "".join(deltas) == whole == tape.output(start, NUM_NEW)
