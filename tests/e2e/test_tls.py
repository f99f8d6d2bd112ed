"""HTTPS: our own requests and tools, certificates that are replaced while serving, bad files."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.server_process import wait_for_server
from runtime.config.options import HttpArgs
from runtime.errors import StartupError
from server.tls import Certificate
from tests.support.certificates import HAVE_OPENSSL, Files, make_certificate
from tests.support.server import ROOT, ServerProcess, python_path
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not HAVE_OPENSSL, reason="certificates need the openssl command")
LONG = {"text": "The wheel", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}


def trusting(files: Files) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(files.certificate))
    return httpx.Client(verify=context, timeout=60, trust_env=False)


def shown(server: ServerProcess) -> str:
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30)


def wait_until_shown(server: ServerProcess, files: Files) -> None:
    until(lambda: shown(server) == files.certificate.read_text(), 30, server)


@pytest.fixture
def in_use(tmp_path: Path) -> Files:
    return make_certificate(tmp_path / "in_use")


@pytest.fixture
def server(in_use: Files) -> Iterator[ServerProcess]:
    files = ("--ssl-certfile", str(in_use.certificate), "--ssl-keyfile", str(in_use.key))
    with ServerProcess("--model-path", str(tiny_model("qwen3")), *files) as started:
        # The warm-up came through HTTPS.
        yield started.wait_ready()


def headrace(in_use: Files, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "SSL_CERT_FILE": str(in_use.certificate),
        },
    )


def test_our_tools_speak_it(server: ServerProcess, in_use: Files, tmp_path: Path, monkeypatch):
    url = f"https://localhost:{server.port}"
    assert any(line.endswith(f"https://127.0.0.1:{server.port}") for line in server.lines)
    with trusting(in_use) as client:
        assert client.get(f"{url}/model_info").status_code == 200
        with client.stream("POST", f"{url}/generate", json={**LONG, "stream": True}) as answer:
            *_, last, done, _ = answer.read().decode().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["meta_info"]["completion_tokens"] == 100
        info = client.get(f"{url}/server_info").json()
        assert info["ssl_certfile"] == in_use.certificate.name
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{server.port}/model_info")
    chat = headrace(in_use, "chat", "--url", url, "--max-tokens", "4", text="Hello\n")
    assert (chat.returncode, chat.stderr) == (0, "")
    stranger = make_certificate(tmp_path / "stranger")
    refused = headrace(stranger, "chat", "--url", url, text="Hello\n")
    assert refused.returncode == 1
    assert "SSL_CERT_FILE" in refused.stderr
    out = tmp_path / "bench.json"
    options = ("--random-input-len", "8", "--random-output-len", "4", "--vocab-size", "256")
    bench = headrace(
        in_use,
        *("bench", "serving", "--url", url, "--num-prompts", "3", *options),
        *("--output-file", str(out)),
    )
    assert bench.returncode == 0, bench.stderr
    assert json.loads(out.read_text())["result"]["num_completed"] == 3
    with pytest.raises(ssl.SSLCertVerificationError):
        wait_for_server(url, timeout=30)
    monkeypatch.setenv("SSL_CERT_FILE", str(in_use.certificate))
    wait_for_server(url, timeout=30)


def test_a_certificate_is_replaced_while_serving(
    server: ServerProcess, in_use: Files, tmp_path: Path
):
    url = f"https://localhost:{server.port}"
    assert shown(server) == in_use.certificate.read_text()
    new = make_certificate(tmp_path / "new")
    with trusting(in_use) as before:
        assert before.get(f"{url}/model_info").status_code == 200
        # Half of a renewal: what fits together stays in use.
        first = shown(server)
        new.put_certificate_at(in_use)
        server.wait_for_line("the previous certificate stays")
        assert shown(server) == first
        new.put_key_at(in_use)
        wait_until_shown(server, new)
        # An open connection is not cut.
        assert before.get(f"{url}/model_info").status_code == 200
    with trusting(new) as after:
        assert after.post(f"{url}/generate", json=LONG).status_code == 200
    server.wait_for_line("a new certificate is in use")
    assert sum("previous certificate stays" in line for line in server.lines) == 1


def test_files_that_cannot_be_used_are_one_line(in_use: Files, tmp_path: Path):
    other = make_certificate(tmp_path / "other")
    locked = make_certificate(tmp_path / "locked", password="secret")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def why(**options: object) -> str:
        with pytest.raises(StartupError) as error:
            Certificate.wanted(HttpArgs(**{k: str(v) for k, v in options.items()}))
        assert "\n" not in error.value.message
        return error.value.message

    certificate = in_use.certificate
    assert "--ssl-keyfile needs --ssl-certfile" in why(ssl_keyfile=in_use.key)
    assert "key values mismatch" in why(ssl_certfile=certificate, ssl_keyfile=other.key)
    assert f"{tmp_path}/none: No such file" in why(ssl_certfile=tmp_path / "none")
    assert "cannot be used" in why(ssl_certfile=certificate)
    assert "not a regular file" in why(ssl_certfile=certificate, ssl_keyfile=fifo)
    assert "not a regular file" in why(ssl_certfile=tmp_path, ssl_keyfile=in_use.key)
    # And nothing waits for an answer at the terminal.
    pair = {"ssl_certfile": locked.certificate, "ssl_keyfile": locked.key}
    assert "cannot be used" in why(**pair)
    assert "cannot be used" in why(**pair, ssl_keyfile_password="wrong")
    names = {name: str(value) for name, value in pair.items()}
    assert Certificate.wanted(HttpArgs(**names, ssl_keyfile_password="secret")) is not None
    assert Certificate.wanted(HttpArgs()) is None
    with ServerProcess("--ssl-certfile", str(tmp_path / "none")) as server:
        assert server.wait_exit() == 1
        assert [line for line in server.lines if line.startswith("headrace: TLS: ")], server.log
