"""`guidellm`: a benchmark of chat and of text completions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.demo import MODEL_PATH
from tests.clients.scenarios import need, succeed

need("guidellm", "guidellm")


@pytest.mark.parametrize("form", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark(url: str, form: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={form}"]
    command += ["--profile", "kind=concurrent,streams=4"]
    command += ["--constraint", "kind=max_requests,count=12"]
    command += ["--tokenizer", f"kind=hf_auto,model={MODEL_PATH}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    # After its last request it drops results that reach it later than this; 0.1 by default.
    succeed(command, GUIDELLM__MP_POLL_INTERVAL="2")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
    # What the server counts is what was asked for.
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == 8
