"""`headrace doctor` predicts what a start then does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.doctor import examine as doctor
from headrace.doctor.command import main
from runtime.checkpoint.demo import TOY_NAME
from runtime.launch.hardware import Hardware
from tests.support.fake_checkpoint import write_config
from tests.support.server import ROOT, ServerProcess, python_path
from tests.support.tiny_models import copy_of, edit_json, tiny_model

# So that the pool is limited by memory, and small.
LITTLE = ("--mem-fraction-static", "0.05", "--max-running-requests", "512")


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]):
    def ask(*arguments: str, status: int = 0) -> dict[str, Any]:
        if not {"--model-path", "--config"} & set(arguments):
            arguments += ("--model-path", TOY_NAME)
        assert main([*arguments, "--json"]) == status
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert report["ok"] == (status == 0)
        return report

    return ask


def free_gib(arithmetic: str) -> float:
    found = re.search(r"\((\d+\.\d+) free", arithmetic)
    assert found is not None
    return float(found[1])


def test_the_demo_model_gets_the_pool_and_kernels_that_were_told(ask) -> None:
    with ServerProcess(*LITTLE) as server:
        server.wait_ready()
        log = server.log
    report = ask(*LITTLE)
    model, needs = report["model"], report["needs"]
    pool = re.search(r"KV pool: (\d+) tokens = (\d+) pages of (\d+); (\d+) bytes a token", log)
    budget = re.search(r"Memory for the KV pool, GiB: (.*)", log)
    weights = re.search(r"Weights: (\d+\.\d+) GiB on cpu", log)
    assert pool is not None
    assert budget is not None
    assert weights is not None
    tokens, _, page_size, bytes_per_token = map(int, pool.groups())
    assert needs["pool"]["page_size"] == page_size
    assert needs["bytes_per_token"] == bytes_per_token
    # The two differ as what is free differs, which the lines tell.
    told = free_gib(needs["pool"]["arithmetic"]) / free_gib(budget[1])
    assert needs["pool"]["num_tokens"] / tokens == pytest.approx(told, rel=0.02)
    assert needs["weight_bytes"] <= float(weights[1]) * 2**30 + 2**23
    assert f"attention by {report['attention']['implementation']}" in log
    for kernel in report["kernels"]:
        assert re.search(rf"\b{kernel['op']}\b[^(]* by {kernel['implementation']} \(", log)
    for choice in model["choices"]:
        # The server of the test chooses another library for grammars.
        if not choice.startswith("grammar_backend"):
            assert choice in log


def test_what_is_asked_for_is_what_comes(ask) -> None:
    folder = tiny_model("mistral_window")
    report = ask(
        *("--model-path", str(folder), "--max-total-tokens", "640", "--page-size", "32"),
        *("--max-running-requests", "9", "--dtype", "bfloat16"),
    )
    model, needs = report["model"], report["needs"]
    assert model["architecture"] == "MistralForCausalLM"
    assert model["layer_states"] == {"2 heads of 16, window 8": 3}
    assert needs["weight_bytes"] == model["num_parameters"] * 2
    # Keys and values of 3 layers with 2 heads of 16, 2 bytes a number.
    assert needs["bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    assert needs["pool"]["num_pages"] == 20
    assert needs["longest_request"] == 256
    assert needs["capacities"] == [{"num_tokens": 256, "num_requests": 2}]


def test_short_requests_are_limited_by_the_batch(ask) -> None:
    report = ask("--max-running-requests", "4", "--max-total-tokens", "100000")
    assert report["needs"]["capacities"] == [{"num_tokens": 2048, "num_requests": 4}]


def test_config_json_is_enough(ask, tmp_path: Path) -> None:
    config = write_config(tmp_path) / "config.json"
    report = ask("--config", str(config), "--max-total-tokens", "64")
    assert report["needs"]["pool"]["num_tokens"] == 64
    # A server could not do with it.
    (problem,) = ask("--model-path", str(tmp_path), status=1)["problems"][:1]
    assert "no weights" in problem["reason"]
    assert "--config" in problem["remedy"]


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Hardware(num_gpus=1, torch_has_cuda=True, cpu_has_bf16=True, num_cores=2)
    monkeypatch.setattr(doctor, "detect_hardware", lambda: gpu)


def test_a_gpus_pool_is_told_as_the_most_there_can_be(ask, monkeypatch, with_gpu) -> None:
    free, total = 100 * 2**30, 140 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))
    report = ask("--max-running-requests", "65536", "--mem-fraction-static", "0.5")
    needs = report["needs"]
    assert (report["model"]["device"], report["attention"]["implementation"]) == ("cuda", "triton")
    assert needs["pool"]["is_at_most"]
    fits = (free - needs["weight_bytes"] - total // 2) // needs["bytes_per_token"]
    assert needs["pool"]["num_pages"] == fits // 16


def test_a_gpu_that_does_not_work_is_a_problem(ask, monkeypatch, with_gpu) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system\nis too old")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    (problem,) = ask(status=1)["problems"]
    assert problem["reason"].endswith("The NVIDIA driver on your system is too old")


def test_ranks_share_weights_and_pages(ask, tmp_path: Path) -> None:
    config = str(tiny_model("llama") / "config.json")
    alone = ask("--config", config)["needs"]
    shared = ask("--config", config, "--tp-size", "2")["needs"]
    assert shared["weight_bytes"] * 2 == alone["weight_bytes"]
    assert shared["bytes_per_token"] * 2 == alone["bytes_per_token"]
    (problem,) = ask("--config", config, "--tp-size", "3", status=1)["problems"]
    assert "cannot be shared evenly" in problem["reason"]


def test_an_unsupported_architecture_is_named_with_the_supported(ask, tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    config.write_text('{"architectures": ["UnheardOfForCausalLM"]}')
    report = ask("--config", str(config), status=1)
    (problem,) = report["problems"]
    assert "'UnheardOfForCausalLM' is not supported" in problem["reason"]
    assert "LlamaForCausalLM" in problem["reason"]
    assert report["model"] is None
    assert report["machine"]["memory_bytes"] > 0
    assert {"torch", "triton"} <= {library["name"] for library in report["libraries"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": "wide"}, "'hidden_size' is 'wide'; expected an integer"),
        ({"num_hidden_layers": ...}, "'num_hidden_layers' is missing"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized with 'aqlm'"),
        ({"num_hidden_layers": 4}, "tensors missing"),
    ],
)
def test_a_broken_config_is_one_line(ask, tmp_path: Path, change: dict[str, Any], reason: str):
    folder = copy_of("llama", tmp_path / "model")
    edit_json(folder / "config.json", **change)
    (problem,) = ask("--model-path", str(folder), status=1)["problems"]
    assert reason in problem["reason"]
    assert "\n" not in problem["reason"] + problem["remedy"]


def test_a_folder_without_config_is_no_model(ask, tmp_path: Path) -> None:
    (problem,) = ask("--model-path", str(tmp_path), status=1)["problems"]
    assert "no config.json" in problem["reason"]
    missing = str(tmp_path / "config.json")
    (problem,) = ask("--config", missing, status=1)["problems"]
    assert problem["reason"] == f"{missing}: no such file."


def test_a_model_that_is_too_large_is_refused_with_its_numbers(ask, tmp_path: Path) -> None:
    folder = write_config(tmp_path, hidden_size=2**15, num_hidden_layers=2**12)
    report = ask("--config", str(folder / "config.json"), "--dtype", "bfloat16", status=1)
    (problem,) = report["problems"]
    assert problem["reason"].startswith("The weights take")
    assert report["needs"]["weight_bytes"] == report["model"]["num_parameters"] * 2
    assert report["needs"]["pool"] is None


def test_wrong_options_end_as_the_servers_do(ask, capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = ask("--page-size", "0", status=1)["problems"]
    assert problem["reason"].startswith("--page-size must be at least 1")
    with pytest.raises(SystemExit) as left:
        main(["--pages", "3"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("headrace doctor: error: unknown option --pages")


def test_it_works_without_torch_and_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from headrace.doctor.command import main\nsys.exit(main(['--model-path', 'demo-toy']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Qwen3ForCausalLM" in done.stdout
    assert "Problem: torch cannot be imported" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_table_holds_the_numbers() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.cli",
            "doctor",
            "--model-path",
            TOY_NAME,
            "--max-total-tokens",
            "4096",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    for part in (
        "4,096 tokens = 256 pages of 16",
        "demo-toy",
        "Qwen3ForCausalLM",
        "The server can start.",
    ):
        assert part in done.stdout
    assert not done.stderr
