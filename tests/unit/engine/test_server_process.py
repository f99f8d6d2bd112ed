"""Servers started from a notebook, with small programs in their place."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from headrace.utils import (
    execute_shell_command,
    is_in_ci,
    launch_server_cmd,
    print_highlight,
    read_jsonl,
    reserve_port,
    terminate_process,
    wait_for_http_ready,
    wait_for_server,
)
from tests.support.processes import children

SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sys.argv[1:], os.environ.get("MODE")]).encode())
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_server_is_started_waited_for_and_ended(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    mine = subprocess.Popen(["sleep", "600"])
    command = f"MODE=fast python {script} --override '{{\"a b\": 1}}' \\\n --flag"
    process, port = launch_server_cmd(command, host="127.0.0.1")
    try:
        assert 30000 <= port < 40000
        wait_for_server(f"http://127.0.0.1:{port}", timeout=30, process=process)
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            words, mode = json.loads(answer.read())
        assert words == ["--override", '{"a b": 1}', "--flag", "--port", str(port)]
        assert mode == "fast"
        grandchildren = children(process.pid)
        assert len(grandchildren) == 1
    finally:
        terminate_process(process)
        terminate_process(process)
    assert process.poll() is not None
    assert mine.poll() is None
    mine.kill()
    mine.wait()
    # The same port can be had at once.
    with http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler):
        pass


def test_waiting_ends_when_the_process_does():
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="exit code 3"):
        wait_for_server("http://127.0.0.1:9", process=process)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        wait_for_http_ready("http://127.0.0.1:9/", timeout=0.3)
    assert time.monotonic() - started < 20


ENDING = """
import sys, time
print("a line of the output", flush=True)
print("headrace: the model is not there", file=sys.stderr, flush=True)
raise SystemExit(5)
"""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_waiting_knows_the_process_that_was_started_for_the_port(tmp_path, capfd, host):
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    process, port = launch_server_cmd(f"python {script}", host="127.0.0.1")
    try:
        # No process is named and no limit of time: as documents wait.
        with pytest.raises(RuntimeError, match="ended with exit code 5") as caught:
            wait_for_server(f"http://{host}:{port}")
        lines = str(caught.value).splitlines()
        assert lines[-2:] == ["a line of the output", "headrace: the model is not there"]
        # What it wrote was shown meanwhile.
        assert "the model is not there" in capfd.readouterr().out
    finally:
        terminate_process(process)
    # Whatever listens there next is another one, which may take its time.
    with pytest.raises(TimeoutError):
        wait_for_server(f"http://{host}:{port}", timeout=0.3)


def test_a_server_with_a_key_counts_as_up():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("Authorization") == "Bearer k" else 401)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        wait_for_server(url, timeout=60)
        wait_for_server(url, timeout=60, api_key="k")
        server.shutdown()


def test_commands_without_a_command_are_refused():
    with pytest.raises(ValueError, match="No command"):
        execute_shell_command("A=1 B=2")


def test_no_port_left():
    with pytest.raises(RuntimeError, match="No free port"):
        reserve_port("127.0.0.1", 30000, 30000)


def test_a_port_is_drawn_once():
    # Two notebooks, or two tests with the same seed, draw the same numbers.
    port, reserved = reserve_port("127.0.0.1")
    with reserved, pytest.raises(RuntimeError, match="No free port"):
        reserve_port("127.0.0.1", port, port + 1)


def test_notebook_helpers(monkeypatch, capsys, tmp_path):
    for name in ("HEADRACE_IS_IN_CI", "SGLANG_IS_IN_CI"):
        monkeypatch.delenv(name, raising=False)
    assert not is_in_ci()
    print_highlight({"any": "object"})
    assert capsys.readouterr().out == "{'any': 'object'}\n"
    monkeypatch.setitem(os.environ, "SGLANG_IS_IN_CI", "true")
    assert is_in_ci()
    path = tmp_path / "x.jsonl"
    path.write_text('# a comment\n{"a": 1}\n\n{"a": 2}\n')
    assert list(read_jsonl(str(path))) == [{"a": 1}, {"a": 2}]
