"""Every benchmark end to end: the engine's processes, the worker alone, a server over HTTP."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.h200 import run as h200
from headrace.bench import latency, offline, one_batch, serving
from headrace.bench.shapes import write_shape
from headrace.cli import main as headrace
from tests.support.guard import unwatch, watch
from tests.support.native import slowed
from tests.support.processes import alive, children, command
from tests.support.server import ServerProcess, common_server, python_path
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.waiting import until

SMALL = ("--random-input-len", "16", "--random-output-len", "6")
WORKER = "headrace.bench.one_batch_worker"
ENGINE = ("--shape", "tiny", "--num-threads", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A benchmark sets up the logs of its process, which is that of later tests, too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def result(path: Path) -> dict:
    content = json.loads(path.read_text())
    assert content["environment"]["headrace"]
    return content["result"]


@pytest.mark.parametrize(
    ("backend", "processes"),
    [("headrace", 1), ("sglang", 2), ("openai", 4), ("openai-chat", 1)],
)
def test_serving(
    server: ServerProcess, tmp_path: Path, backend: str, processes: int, capsys
) -> None:
    path = tmp_path / "out.json"
    arguments = ["--url", server.url, "--backend", backend, "--num-prompts", "9", *SMALL]
    arguments += ["--max-concurrency", "4", "--vocab-size", str(VOCAB_SIZE)]
    arguments += ["--num-client-processes", str(processes), "--output-file", str(path)]
    arguments += ["--plot", str(tmp_path / "out.html"), "--output-details"]
    if backend == "openai-chat":
        arguments += ["--tokenizer", str(tiny_model("qwen3"))]
    assert serving.main(arguments) == 0
    summary = result(path)
    assert (summary["num_completed"], summary["num_failed"]) == (9, 0)
    assert summary["output_tokens"] == 9 * 6
    assert 9 <= summary["num_events"] <= summary["output_tokens"]
    assert summary["max_concurrency"] <= 4
    if backend != "openai-chat":
        assert summary["input_tokens"] == 9 * 16
    assert summary["ttft_ms"]["p50"] > 0
    requests = json.loads(path.read_text())["requests"]
    assert [request["index"] for request in requests] == list(range(9))
    assert (tmp_path / "out.html").stat().st_size > 1000
    assert "output tok/s" in capsys.readouterr().out


def test_serving_of_a_file_at_a_rate_with_a_flush(
    server: ServerProcess, tmp_path: Path, capsys
) -> None:
    lines = [{"prompt": f"The miller opens gate {number}", "output_len": 3} for number in range(4)]
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["--url", server.url, "--dataset-name", "jsonl", "--flush-cache"]
    arguments += ["--dataset-path", str(tmp_path / "set.jsonl"), "--request-rate", "100"]
    arguments += ["--goodput", "ttft:60000", "--output-file", str(tmp_path / "out.json")]
    assert serving.main(arguments) == 0
    summary = result(tmp_path / "out.json")
    assert summary["output_tokens"] == 12
    assert summary["good_share"] == 1.0
    assert "goodput" in capsys.readouterr().out


def test_serving_refuses_a_file_that_the_api_cannot_take(
    server: ServerProcess, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    arguments = ["--url", server.url, "--dataset-name", "jsonl", "--dataset-path", str(path)]
    assert serving.main(arguments) == 1
    captured = capsys.readouterr()
    assert "use --backend openai-chat" in captured.err
    assert captured.out == ""


def test_serving_says_what_the_server_refuses(server: ServerProcess, capsys) -> None:
    arguments = ["--url", server.url, "--num-prompts", "1", "--random-input-len", "64"]
    assert serving.main(arguments) == 1
    error = capsys.readouterr().err
    assert "HTTP 400" in error
    assert "--vocab-size" in error


def test_offline_with_a_shared_prefix(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--num-prompts", "3", *SMALL, "--dataset-name", "shared-prefix"]
    arguments += ["--prefix-len", "64", "--stream", "--output-file", str(path)]
    assert offline.main([*ENGINE, *arguments]) == 0
    summary = result(path)
    assert summary["output_tokens"] == 3 * 6
    assert summary["input_tokens"] == 3 * 80
    assert summary["cached_tokens"] > 0


def test_latency_of_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_shape("tiny", tmp_path / "model")
    path = tmp_path / "out.json"
    arguments = ["--model-path", str(folder), "--load-format", "dummy", "--num-threads", "1"]
    arguments += ["--batch-size", "2", "--input-len", "16", "--output-len", "4"]
    arguments += ["--num-iters", "2", "--output-file", str(path)]
    assert latency.main(arguments) == 0
    assert len(result(path)["latencies_ms"]) == 2


def test_one_batch_by_the_command(tmp_path: Path, capfd) -> None:
    path = tmp_path / "out.json"
    arguments = ["--batch-size", "3", "--input-len", "16", "--output-len", "4"]
    with pytest.raises(SystemExit) as ended:
        headrace(["bench", "one-batch", *ENGINE, *arguments, "--output-file", str(path)])
    assert ended.value.code == 0
    (batch,) = result(path)["batches"]
    assert batch["batch_size"] == 3
    assert batch["step_ms"]["p50"] > 0
    assert "batch    3: prefill" in capfd.readouterr().out


def interrupted(
    arguments: list[str],
    is_busy: Callable[[int], bool],
    number: signal.Signals = signal.SIGINT,
) -> tuple[int, str]:
    """Status and words of a benchmark whose process group gets a signal once it is busy."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watch(-process.pid)
    until(lambda: is_busy(process.pid), 60)
    os.killpg(process.pid, number)
    words, _ = process.communicate(timeout=30)
    unwatch(-process.pid)
    return process.returncode, words


def test_ctrl_c_ends_the_clients_without_a_word(server: ServerProcess) -> None:
    def is_busy(_: int = 0) -> bool:
        (load,) = server.client.get("/v1/loads").json()["loads"]
        return bool(load["num_running_reqs"])

    arguments = ["--url", server.url, "--random-input-len", "8", "--random-output-len", "200"]
    arguments += ["--vocab-size", str(VOCAB_SIZE)]
    arguments += ["--warmup-requests", "0", "--num-client-processes", "2"]
    # What has ended would be told of.
    with slowed(server):
        assert interrupted(["serving", *arguments], is_busy) == (130, "")
    until(lambda: not is_busy(), 20)


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_keeps_what_was_measured(
    server: ServerProcess, tmp_path: Path, processes: int
) -> None:
    path = tmp_path / "out.json"

    def num_answered() -> int:
        return sum(" POST /generate 200 " in line for line in server.lines)

    before = num_answered()
    arguments = ["--url", server.url, "--random-input-len", "8", "--random-output-len", "8"]
    arguments += ["--vocab-size", str(VOCAB_SIZE), "--num-prompts", "100000", "--no-progress"]
    arguments += ["--warmup-requests", "0", "--num-client-processes", str(processes)]
    arguments += ["--max-concurrency", "4", "--output-file", str(path), "--output-details"]
    code, words = interrupted(["serving", *arguments], lambda _: num_answered() > before + 30)
    assert code == 130
    summary = result(path)
    assert summary["stopped_early"] is True
    records = json.loads(path.read_text())["requests"]
    assert len(records) == summary["num_completed"] >= 10
    assert summary["num_failed"] == 0
    assert summary["output_tokens"] == 8 * len(records)
    assert f"Stopped: {len(records)} of 100000 requests" in words
    assert "output tok/s" in words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_of_one_batch_ends_with_it(number: signal.Signals) -> None:
    workers: list[int] = []

    def has_worker(pid: int) -> bool:
        # Others come and go, which are asked about the machine.
        workers[:] = [child for child in children(pid) if WORKER in command(child)]
        # Its second thread begins when it has read what it is to do.
        return any(len(os.listdir(f"/proc/{worker}/task")) > 1 for worker in workers)

    arguments = ["--input-len", "64", "--output-len", "64", "--num-iters", "100000"]
    code, words = interrupted(["one-batch", *ENGINE, *arguments], has_worker, number)
    if number == signal.SIGINT:
        assert (code, words) == (130, "")
    else:
        assert code == -number
    until(lambda: not any(map(alive, workers)), 10)


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (one_batch.main, ["--batch-size", "5000"], "--max-running-requests"),
        (one_batch.main, ["--input-len", "5000"], "do not fit"),
        (latency.main, ["--batch-size", "0"], "at least 1"),
        (offline.main, ["--model-path", "/none"], "/none"),
    ],
)
def test_what_cannot_run_is_one_line(main, arguments: list[str], words: str, capfd) -> None:
    options = ENGINE if "--model-path" not in arguments else ()
    assert main([*options, *arguments]) == 1
    error = capfd.readouterr().err
    assert error.startswith("headrace bench: ")
    assert words in error


def test_cases_of_the_gpu_script(tmp_path: Path) -> None:
    arguments = [*"ABCDEF", "--smoke", "--shape", "tiny", "--out", str(tmp_path)]
    assert h200.main([*arguments, "--num-threads", "1"]) == 0
    cases = json.loads((tmp_path / "tiny.json").read_text())["cases"]
    assert set(cases) == {"start", *"ABCDE", "start-server", "F"}
    assert not [name for name, case in cases.items() if "error" in case]
    assert cases["E"]["runs"][0]["hot_cached_tokens"] > 0
    assert cases["F"]["num_failed"] == 0
