"""The native API's pages and its example scripts, run as they stand against one real server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.native import GREEDY, generate, slowed
from tests.support.server import ServerProcess, running_server
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}


def curls(*pages: str) -> list[str]:
    """The commands of some pages."""
    text = "".join(PAGES[name] for name in pages)
    return re.findall(r"^```bash\n(curl .*?)\n```", text, re.MULTILINE | re.DOTALL)


CURLS = curls("native_api.md", "native_generate.md")
# They need models of another kind: `test_minilm`, `test_trained_heads`, `test_expert_records`.
ELSEWHERE = {"encode.py", "rerank.py", "classify.py", "expert_distribution.py"}
SCRIPTS = {
    path.name: path
    for path in sorted((ROOT / "examples" / "native_api").glob("*.py"))
    if path.name not in ELSEWHERE
}
# What an answer must hold, by a piece of the command.
ANSWERS = {
    "return_logprob": '"output_token_logprobs":[[',
    '"stream": true': "data: [DONE]",
    '"capacity_of_str_len"': '"mine"',
    '"rid": "first", "session_params"': "Paris",
    '"session_params": {"id": "mine", "rid": "first"}': "Tokyo",
    "/close_session": "200",
    "/tokenize": '"count":',
    "/detokenize": '"text":"',
    "/model_info": '"is_generation":true',
    "/server_info": '"internal_states":[',
    "/v1/loads": '"num_running_reqs":',
    "/health_generate": "200",
    "/flush_cache": "Cache flushed.",
    "/abort_request": "200",
    "/update_weights_from_disk": '"success":false',
    '"text": "The capital of France is", "sampling_params"': "Paris",
}
PRINTED = {
    "pause.py": "done: False\nafter it: True\nwithout its memory: 503\nas before: True",
    "score.py": "Japan -> Tokyo",
    "choices.py": "answer: Paris",
    "structured_output.py": "400 regex",
    "abort.py": "abort True",
    "flush_cache.py": "after it: 0 tokens",
    "generate.py": "Paris",
    "health.py": "200 /health_generate",
    "hidden_states.py": "last alone: ",
    "input_embeds.py": "as with tokens: True",
    "logprobs.py": "Chosen:  Paris",
    "model_info.py": "is_generation: True",
    "sessions.py": "Tokyo",
    "stop.py": "'matched': '[.!?]",
    "stream.py": "Paris",
    "tokenize_round_trip.py": "the same: True",
    "update_weights.py": "True Succeeded to update model weights.",
}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(profiles: Path) -> Iterator[ServerProcess]:
    # Offline: a model of a wrong name is not looked for on the hub.
    options = ("--enable-return-hidden-states", "--profile-root", str(profiles))
    with ServerProcess(*options, HF_HUB_OFFLINE="1") as made:
        yield made.wait_ready()


def run(command: str, server: ServerProcess) -> str:
    """What a command of a page prints."""
    return subprocess.run(
        ["bash", "-c", command.replace("30000", str(server.port))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_the_pages_commands_are_answered(server):
    # In the order of the pages: sessions are opened before they are used.
    for command in CURLS:
        wanted = [text for piece, text in ANSWERS.items() if piece in command]
        assert wanted, f"say in ANSWERS what this command must print: {command}"
        assert wanted[0] in run(command, server), command


@needs_grammars
def test_the_command_about_structured_output(server):
    (command,) = curls("structured_output.md")
    (pattern,) = re.findall(r'"regex": "(.*?)"', command)
    assert re.fullmatch(pattern, json.loads(run(command, server))["text"])


def test_the_command_about_profiles(server, profiles):
    (command,) = curls("control.md")
    run(command, server)
    generate(server, text="The", sampling_params={**GREEDY, "max_new_tokens": 12})
    until(lambda: list((profiles / "prompts").glob("*-TP-0.trace.json.gz")), 20, "no trace")


def test_a_page_names_every_native_route(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    native = {
        path
        for path, methods in paths.items()
        for each in methods.values()
        if "native" in each.get("tags", [])
    }
    assert {path for path in native if not any(path in page for page in PAGES.values())} == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name, server):
    if name == "structured_output.py" and not BACKENDS:
        pytest.skip("neither grammar library is installed")
    # Prompts as embeddings need a server without prefix cache; another test starts one, too.
    url = server.url
    if name == "input_embeds.py":
        url = running_server(
            "qwen3",
            *("--disable-radix-cache", "--enable-return-hidden-states"),
            *("--chunked-prefill-size", "16", "--random-seed", "5"),
        ).url
    # What is to be aborted must still run when a busy machine comes to that.
    with slowed(server, 0.02) if name == "abort.py" else contextlib.nullcontext():
        done = subprocess.run(
            [sys.executable, str(SCRIPTS[name]), "--url", url],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hidden_states.py", "--enable-return-hidden-states"),
        ("input_embeds.py", "--disable-radix-cache"),
    ],
)
def test_an_example_tells_what_the_server_lacks(name, reason):
    # As `make serve` starts it, without further options.
    url = running_server("qwen3").url
    done = subprocess.run(
        [sys.executable, str(SCRIPTS[name]), "--url", url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("The server refuses the request (400): ")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_events_of_the_pages_stream_hold_everything_so_far(server):
    (command,) = [each for each in CURLS if '"stream": true' in each]
    lines = [line for line in run(command, server).splitlines() if line.startswith("data: {")]
    texts = [json.loads(line.removeprefix("data: "))["text"] for line in lines]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
