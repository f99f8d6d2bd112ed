"""No process of a serving server looks up a class for pickle, according to an audit hook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.frames import BAD_FRAMES
from tests.support.server import ROOT, ServerProcess, python_path
from tests.support.tiny_models import tiny_model

AUDIT = ROOT / "tests" / "support" / "pickle_audit"
LOOKS_UP = "import pickle, os; pickle.loads(pickle.dumps(os.getcwd))"


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    found = tmp_path / "found"
    model = tiny_model("qwen3")
    audited = {
        "PYTHONPATH": os.pathsep.join([str(AUDIT), python_path()]),
        "PICKLE_AUDIT": str(found),
    }
    subprocess.run([sys.executable, "-c", LOOKS_UP], env={**os.environ, **audited}, check=True)
    assert "getcwd" in found.read_text()
    with ServerProcess("--model-path", str(model), **audited) as server:
        server.wait_ready()
        # What libraries do while they are imported is theirs.
        found.write_text("")
        short = {"max_new_tokens": 4}
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        for path, body, status in (
            ("/generate", {"text": ["a", "b"], "sampling_params": short}, 200),
            ("/generate", {"text": "a", "stream": True, "sampling_params": short}, 200),
            ("/generate", {"text": "a", "return_logprob": True, "sampling_params": short}, 200),
            ("/v1/chat/completions", chat, 200),
            ("/tokenize", {"prompt": "a"}, 200),
            ("/update_weights_from_disk", {"model_path": str(model)}, 200),
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVEAAA"]}, 400),
            ("/flush_cache", {}, 200),
        ):
            answer = server.client.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
        pickled = next(each for each in BAD_FRAMES if each.startswith(b"\x80\x04"))
        refused = httpx.post(
            f"{server.url}/generate", content=pickled, headers={"content-type": "application/json"}
        )
        assert refused.status_code == 400
        assert found.read_text() == ""
