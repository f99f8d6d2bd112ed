"""`headrace chat` and `headrace serve`, as a user starts them."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.chat import ChatFailed, ChatSession, connect, converse

ROOT = Path(__file__).resolve().parents[2]


def headrace(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", *args]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_questions(fake_api: Any) -> None:
    done = headrace("chat", "--url", fake_api.url, text="Hello there\n\nÜber\u2028alles\n")
    assert done.stderr == ""
    assert done.stdout == "Hello there\nÜber\u2028alles\n"
    assert done.returncode == 0
    # The address that OpenAI's client is given.
    assert headrace("chat", "--url", f"{fake_api.url}/v1", text="Hello\n").stdout == "Hello\n"


def test_a_reader_that_leaves_is_no_error(fake_api: Any) -> None:
    command = [sys.executable, "-m", "headrace.cli", "chat", "--url", fake_api.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as chat:
        assert chat.stdout is not None
        chat.stdout.close()
        _, said = chat.communicate(b"Hello\n" * 3, timeout=60)
    assert said == b""
    assert chat.returncode == 128 + signal.SIGPIPE


def test_nobody_answers() -> None:
    done = headrace("chat", "--url", "http://127.0.0.1:9", text="Hi\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "No server answers at http://127.0.0.1:9" in done.stderr
    assert "headrace serve" in done.stderr
    assert "Traceback" not in done.stderr
    assert headrace("chat", "--url", "nonsense").returncode == 1


def test_version_and_help() -> None:
    assert headrace("--version").stdout.startswith("headrace ")
    assert "--model-path" in headrace("serve", "--help").stdout
    assert "--thinking" in headrace("chat", "--help").stdout


def test_conversation(fake_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["Hello", "/help", "/nothing", "", "again", "/clear", "last", EOFError])

    def type_line(_: str) -> str:
        line = next(lines)
        if line is EOFError:
            raise EOFError
        return str(line)

    monkeypatch.setattr("builtins.input", type_line)
    out, log = io.StringIO(), io.StringIO()
    with connect(fake_api.url) as client:
        session = ChatSession(client, system="Be kind.", temperature=0)
        assert converse(session, Terminal(), out, log) == 0
    shown = out.getvalue()
    assert fake_api.model in shown
    assert "Hello\n" in shown
    assert "Ctrl-C" in shown
    assert "(no command /nothing" in shown
    # Cleared before the last question; the system message stays.
    assert [message["content"] for message in session.messages] == ["Be kind.", "last", "last"]
    assert log.getvalue() == ""


def test_reasoning_is_set_apart(fake_api: Any) -> None:
    with connect(fake_api.url) as client:
        session = ChatSession(client, thinking=True)
        pieces = list(session.ask("<think>hm</think>yes"))
    assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "hm"
    assert "".join(piece.text for piece in pieces if not piece.is_reasoning) == "yes"


def test_a_stopped_answer_is_remembered(fake_api: Any) -> None:
    with connect(fake_api.url) as client:
        session = ChatSession(client)
        answer = session.ask("A rather long question to repeat")
        next(answer)
        answer.close()
        assert [message["role"] for message in session.messages] == ["user", "assistant"]
        assert session.messages[1]["content"]
        assert list(session.ask("next"))


def test_a_refused_question_is_taken_back(fake_api: Any) -> None:
    with connect(fake_api.url) as client:
        session = ChatSession(client, temperature=-1)
        with pytest.raises(ChatFailed, match="temperature"):
            list(session.ask("Hi"))
        assert session.messages == []


def test_import_is_light() -> None:
    code = (
        "import sys, headrace, headrace.cli, headrace.chat;"
        "import openai_api.routes, openai_api.openai_context;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
