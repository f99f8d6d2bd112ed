"""The example of an RL loop, as its users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import torch
from safetensors.torch import load_file

from tests.support.native import slowed
from tests.support.server import ROOT, running_server
from tests.support.tiny_models import tiny_model

LINE = re.compile(r"round-(\d): reward [\d.]+, (\d) of 8 rollouts .* at most (\S+) apart")


def test_the_loop_in_miniature() -> None:
    folder = tiny_model("qwen3")
    server = running_server("qwen3", "--num-threads", "1", "--random-seed", "1", "--tp-size", "1")
    # Rollouts take seconds: the pause, which comes after other work, finds them under way.
    with slowed(server, 0.03):
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "examples" / "rl" / "loop.py"), "--url", server.url),
                *("--model-path", str(folder), "--rounds", "2", "--num-tokens", "120"),
                *("--learning-rate", "5"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    rounds = LINE.findall(done.stdout)
    assert [number for number, _, _ in rounds] == ["0", "1"]
    # Under way with the old weights when generation paused, and ended with the new ones.
    assert sum(int(updated) for _, updated, _ in rounds) > 0
    assert all(float(apart) < 1e-3 for _, _, apart in rounds)
    # The trainer has moved, and the server with it.
    name = "model.layers.0.mlp.down_proj.weight"
    body = {"name": name, "truncate_size": 1000}
    moved = server.client.post("/get_weights_by_name", json=body).json()
    started = load_file(folder / "model.safetensors")[name]
    assert (torch.tensor(moved) - started).abs().max() > 1e-5
    answer = server.client.post(
        "/update_weights_from_disk",
        json={"model_path": str(folder), "weight_version": "default"},
    )
    assert answer.status_code == 200


def test_the_command_of_the_guide() -> None:
    page = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```bash\n(curl .*?)^```", page, re.MULTILINE | re.DOTALL)
    folder = tiny_model("qwen3")
    server = running_server("qwen3", "--num-threads", "1", "--random-seed", "1", "--tp-size", "1")
    here = command.replace("30000", str(server.port)).replace("/path/to/step-7", str(folder))
    answer = subprocess.run(["bash", "-c", here], capture_output=True, text=True, check=True)
    said = re.search(r"The answer is `(\{.*?\})`", page, re.DOTALL)
    assert said is not None
    assert json.loads(answer.stdout) == json.loads(said[1].replace("\n", " "))
