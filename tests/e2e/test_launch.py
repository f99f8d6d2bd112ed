"""The launch command as users see it: one-line errors, progress, signals, restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.errors import StartupError
from runtime.ipc.transport import remove_run_folder
from runtime.launch.assemble import assemble
from runtime.launch.command_line import parse_args
from runtime.launch.prepare import prepare_engine
from tests.faults.test_kill import children_by_name
from tests.support.processes import alive
from tests.support.server import READY_LINE, ServerProcess, free_port
from tests.support.tiny_models import ENDOFTEXT_ID, IM_END_ID, copy_of, edit_json, tiny_model
from tests.support.waiting import until

LONG = {"text": "The wheel", "sampling_params": {"max_new_tokens": 240, "ignore_eos": True}}


def _one_line_failure(*args: str, found_by_worker: bool = False) -> str:
    server = ServerProcess(*args)
    assert server.wait_exit() == 1, server.log
    errors = [line for line in server.lines if line.startswith("headrace: ")]
    assert len(errors) == 1, server.log
    assert "Traceback" not in server.log
    # What can be known before seconds go into imports is.
    assert ("Starting the worker" in server.log) == found_by_worker
    return errors[0]


def _broken_config(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["UnheardOfForCausalLM"])


def _missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "break_it", [_broken_config, _missing_weights, _cut_weights, _missing_tokenizer]
)
def test_a_broken_model_folder_is_one_line(tmp_path, break_it):
    folder = copy_of("qwen3", tmp_path / "model")
    break_it(folder)
    _one_line_failure("--model-path", str(folder))


# Of each file one fault here, as the whole server meets it; the others are asked of its parts.
def _deep_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_a_template_that_cannot_be_compiled_is_one_line(tmp_path):
    folder = copy_of("qwen3", tmp_path / "model")
    _deep_template(folder)
    server = ServerProcess("--model-path", str(folder))
    assert server.wait_exit() == 1, server.log
    assert "Traceback" not in server.log
    assert [line for line in server.lines if line.startswith("headrace: ")] == [
        line for line in server.lines if "chat template" in line
    ]


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **changes)


def _bytes(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


@pytest.mark.parametrize(
    "break_it",
    [
        _config(added_tokens_decoder=5),
        _config(added_tokens_decoder={"x": {"content": "a"}}),
        _config(added_tokens_decoder={"1": {}}),
        _config(added_tokens_decoder={"1": "a"}),
        _config(chat_template=[{"name": "default"}]),
        _config(chat_template=["text"]),
        _config(extra_special_tokens=7),
        _config(model_max_length=10**400, added_tokens_decoder={"1": None}),
        _bytes("tokenizer_config.json", b"[" * 100_000),
        _bytes("tokenizer_config.json", b'"text"'),
        _bytes("tokenizer_config.json", b"\xff\xfe"),
        _bytes("special_tokens_map.json", b"{"),
        _bytes("chat_template.jinja", b"\xff\xfe{{ 1 }}"),
        _bytes("chat_template.json", b'{"chat_template": [5]}'),
        _bytes("tokenizer.json", b"[" * 100_000),
        _bytes("config.json", b'{"vocab_size": ' + b"9" * 5000 + b"}"),
        lambda folder: edit_json(folder / "config.json", rms_norm_eps=10**400),
        lambda folder: edit_json(folder / "config.json", rope_theta=10**400),
        lambda folder: edit_json(folder / "config.json", hidden_size=10**400),
    ],
)
def test_files_that_make_no_sense_are_one_line(tmp_path, break_it):
    folder = copy_of("qwen3", tmp_path / "model")
    break_it(folder)
    with pytest.raises(StartupError) as caught:
        prepare_engine(parse_args(["--model-path", str(folder), "--log-level", "error"]).config)
    assert str(folder) in caught.value.message
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        ({"eos_token": "<|endoftext|>"}, [IM_END_ID, ENDOFTEXT_ID]),
        ({"eos_token": {"content": "<|endoftext|>", "special": True}}, [IM_END_ID, ENDOFTEXT_ID]),
        ({"eos_token": None}, [IM_END_ID]),
    ],
)
def test_the_end_of_the_tokenizer_ends_a_text_too(tmp_path, tokenizer, ids):
    folder = copy_of("qwen3", tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=IM_END_ID)
    edit_json(folder / "tokenizer_config.json", **tokenizer)
    prepared = prepare_engine(parse_args(["--model-path", str(folder)]).config)
    remove_run_folder(prepared.folders.run)
    assert list(prepared.model.eos_token_ids) == ids
    assert prepared.resolved.worker.eos_token_ids == ids
    if prepared.resolved.grammar is not None:
        assert prepared.resolved.grammar.eos_token_ids == ids


def test_keys_of_the_config_can_be_replaced(tmp_path):
    folder = copy_of("qwen3", tmp_path / "model")
    overrides = {"is_matryoshka": True, "max_position_embeddings": 64}
    args = ["--model-path", str(folder), "--json-model-override-args", json.dumps(overrides)]
    prepared = prepare_engine(parse_args(args).config)
    remove_run_folder(prepared.folders.run)
    assert prepared.model.context_len == prepared.resolved.worker.context_len == 64
    assert prepared.model.raw["is_matryoshka"] is True
    assert prepared.resolved.worker.model_overrides == overrides


def test_a_name_that_no_folder_can_have_is_one_line():
    for name in ("x" * 5000, "/" + "x" * 300, "a\0b", "~nobody-has-this-name/x"):
        with pytest.raises(StartupError, match="is not a folder"):
            prepare_engine(parse_args(["--model-path", name]).config)


def test_a_long_folder_for_temporary_files_is_one_line(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    server = ServerProcess("--model-path", str(tiny_model("qwen3")), TMPDIR=str(folder))
    assert server.wait_exit() == 1, server.log
    (line,) = (line for line in server.lines if line.startswith("headrace: "))
    assert "TMPDIR" in line
    assert "Traceback" not in server.log


# Only the worker knows how much memory there is.
BY_WORKER = ("--max-total-tokens",)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--context-length", "100000"], "--context-length"),
        (["--device", "cuda"], "--device cuda"),
        (["--tp-size", "3"], "--tp-size 3: the model's 4 attention heads"),
        (["--tp-size", "2", "--max-total-tokens", "1000000000"], "--max-total-tokens"),
        (["--json-model-override-args", "{"], "--json-model-override-args"),
        (["--json-model-override-args", "[1]"], "--json-model-override-args"),
        (["--json-model-override-args", '{"vocab_size": "x"}'], "vocab_size"),
        (["--preferred-sampling-params", "{"], "--preferred-sampling-params"),
        (["--page-size", "0"], "--page-size"),
        (["--host", "203.0.113.7"], "--host"),
    ],
)
def test_a_bad_option_is_one_line(args, text):
    if args[0] == "--device" and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA device")
    path = str(tiny_model("qwen3"))
    line = _one_line_failure("--model-path", path, *args, found_by_worker=text in BY_WORKER)
    assert text in line


async def test_a_busy_front_hears_why_its_worker_cannot_start():
    args = ["--model-path", str(tiny_model("qwen3")), "--max-total-tokens", "1000000000"]
    host, _ = assemble(prepare_engine(parse_args(args).config))
    await host.start()
    try:
        # It waits for messages, and then does something else for so long that it meets the reason
        # and the end at once. On a fast machine the worker has ended already.
        await asyncio.sleep(0.1)
        until(lambda: "scheduler" not in host.pids())
        with pytest.raises(StartupError, match="--max-total-tokens"):
            await host.wait_ready()
    finally:
        await host.stop()


def test_a_missing_folder_is_one_line():
    assert "/no/such" in _one_line_failure("--model-path", "/no/such/folder")


def test_a_taken_port_is_found_first():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # The model folder does not exist either: the port is looked at before it.
        line = _one_line_failure("--model-path", "/no/such/folder", "--port", port)
    assert port in line
    assert "--port" in line


def test_an_unknown_option_exits_with_2():
    server = ServerProcess("--modle-path", "x")
    assert server.wait_exit() == 2
    assert "--model-path" in server.log


def _listens(server: ServerProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def test_from_start_to_ready_and_out(tmp_path):
    port = free_port()
    # As it is where both libraries for grammars are installed.
    args = ["--model-path", str(tiny_model("qwen3")), "--grammar-backend", "auto"]
    with ServerProcess(*args, "--port", str(port), cwd=tmp_path, plain=True) as server:
        phases = set()
        cpu_s_before_livez = None
        # Held until the front has answered: on a busy machine it might be ready before.
        until(lambda: "scheduler" in children_by_name(server), 60, "no worker")
        worker = children_by_name(server)["scheduler"]
        os.kill(worker, signal.SIGSTOP)
        until(lambda: _listens(server))
        while READY_LINE not in server.log:
            assert server.process.poll() is None, server.log
            answer = server.client.get("/startupz")
            body = answer.json()
            if cpu_s_before_livez is None:
                assert server.client.get("/livez").status_code == 200
                # The clock would count what else this machine does.
                used = psutil.Process(server.process.pid).cpu_times()
                cpu_s_before_livez = used.user + used.system
                assert not body["ready"]
                assert server.client.get("/v1/models").status_code == 200
                os.kill(worker, signal.SIGCONT)
            phases.add(body["phase"])
            if not body["ready"]:
                assert answer.status_code == 503
        assert cpu_s_before_livez is not None
        assert cpu_s_before_livez < 3.0
        assert "starting" in phases
        server.wait_ready()
        assert server.log.count(READY_LINE) == 1
        assert server.lines.index(READY_LINE) > next(
            i for i, line in enumerate(server.lines) if "POST /generate 200" in line
        )
        health = server.client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        rss_pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
        assert rss_pages * os.sysconf("SC_PAGE_SIZE") < 150 * 2**20
        children = server.child_pids()
        # A worker and a detokenizer, and the compiler of grammars once it is there.
        assert len(children) in (2, 3)
        asked_at = time.monotonic()
        server.signal()
        assert server.wait_exit() == 0
        # Of an idle server's two seconds there is a test below.
        assert time.monotonic() - asked_at < 15
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _stream_in_thread(server: ServerProcess, body: dict) -> tuple[threading.Thread, list[str]]:
    events: list[str] = []

    def read() -> None:
        with server.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])  # noqa: PERF401 seen by the other thread as they come

    thread = threading.Thread(target=read)
    thread.start()
    # Until its first token came, an error is a status and no event.
    until(lambda: events, what=server)
    return thread, events


def _slow_model(tmp_path: Path) -> str:
    # Long enough outputs that a signal arrives in their middle.
    folder = copy_of("qwen3", tmp_path / "model")
    edit_json(folder / "config.json", max_position_embeddings=8192)
    edit_json(folder / "tokenizer_config.json", model_max_length=8192)
    return str(folder)


def test_sigterm_lets_streams_finish_and_refuses_new_requests(tmp_path):
    with ServerProcess("--model-path", _slow_model(tmp_path)) as server:
        server.wait_ready()
        server.client.post("/slow_down", json={"forward_sleep_time": 0.03}).raise_for_status()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 180, "ignore_eos": True}}
        thread, events = _stream_in_thread(server, body)
        server.signal()
        deadline = time.monotonic() + 30
        while server.client.get("/health").status_code == 200:
            assert time.monotonic() < deadline
        refused = server.client.post("/generate", json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        chat = server.client.post("/v1/completions", json={"prompt": "a", "model": "m"})
        assert chat.status_code == 503
        assert chat.headers["retry-after"]
        thread.join(60)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] == "length"
        assert server.wait_exit() == 0


def test_the_drain_timeout_aborts_with_a_final_event(tmp_path):
    args = ["--model-path", _slow_model(tmp_path), "--drain-timeout", "0.5"]
    with ServerProcess(*args) as server:
        server.wait_ready()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        thread, events = _stream_in_thread(server, body)
        server.signal()
        assert server.wait_exit() == 0
        thread.join(60)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_idle_server_leaves_at_once():
    def leave() -> float:
        with ServerProcess("--model-path", str(tiny_model("qwen3"))) as server:
            server.wait_ready()
            asked_at = time.monotonic()
            server.signal()
            assert server.wait_exit() == 0
            return time.monotonic() - asked_at

    # A busy machine may hold it up, hardly every time.
    assert any(leave() < 2.0 for _ in range(3))


def _second_signal_s(folder: str) -> float:
    with ServerProcess("--model-path", folder) as server:
        server.wait_ready()
        server.client.post("/slow_down", json={"forward_sleep_time": 0.01}).raise_for_status()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        thread, _ = _stream_in_thread(server, body)
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        asked_at = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.wait_exit() == 0
        took_s = time.monotonic() - asked_at
        # The answer would take 80 s, and is waited for 60 s.
        assert took_s < 20
        thread.join(60)
    return took_s


def test_a_second_signal_stops_now(tmp_path):
    folder = _slow_model(tmp_path)
    assert any(_second_signal_s(folder) < 3.0 for _ in range(3))


def test_a_killed_worker_is_replaced_behind_the_open_port(tmp_path):
    args = ("--model-path", _slow_model(tmp_path), "--max-resumes", "0")
    with ServerProcess(*args) as server:
        server.wait_ready()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        thread, events = _stream_in_thread(server, body)
        killed = children_by_name(server)["scheduler"]
        os.kill(killed, signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()
        assert json.loads(events[-2])["error"]["code"] == 503
        assert events[-1] == "[DONE]"
        # Held where it begins, so that it is surely not ready yet.
        until(lambda: children_by_name(server).get("scheduler", killed) != killed, 60, "none")
        begun = children_by_name(server)["scheduler"]
        os.kill(begun, signal.SIGSTOP)
        assert server.client.get("/livez").status_code == 200
        assert server.client.get("/health").status_code == 503
        refused = server.client.post("/generate", json=LONG)
        assert refused.status_code == 503
        os.kill(begun, signal.SIGCONT)
        until(lambda: server.client.get("/health").status_code == 200, what=server)
        again = server.client.post("/generate", json=LONG)
        assert again.status_code == 200
        assert server.client.get("/server_info").json()["num_restarts"] == 1


@pytest.mark.parametrize("child", ["scheduler", "detokenizer"])
def test_a_stuck_child_is_unready_then_replaced(child):
    args = ["--model-path", str(tiny_model("qwen3")), "--watchdog-timeout", "6"]
    with ServerProcess(*args) as server:
        server.wait_ready()
        pid = children_by_name(server)[child]
        os.kill(pid, signal.SIGSTOP)
        # Without work a frozen child is not alive's concern; work that waits makes it one.
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.client.post("/generate", json=LONG).status_code)
        )
        thread.start()
        until(lambda: pid not in server.child_pids(), what=server)
        thread.join(60)
        # It went on in the new one.
        assert answers == [200]
        until(lambda: server.client.get("/health").status_code == 200, what=server)


def test_the_orphaned_children_leave_with_a_killed_front():
    def orphaned_s() -> float:
        server = ServerProcess("--model-path", str(tiny_model("qwen3"))).wait_ready()
        children = server.child_pids()
        server.process.kill()
        server.wait_exit()
        return until(lambda: not any(map(alive, children)), 30, "an orphan is left")

    assert any(orphaned_s() < 5 for _ in range(3))
