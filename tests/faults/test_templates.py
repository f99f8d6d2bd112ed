"""A hostile chat template affects only its own request, not the loop, memory or other streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.livez_prober import LivezProber
from tests.support.neighbours import Neighbours, greedy
from tests.support.processes import resident_kb
from tests.support.server import ROOT, ServerProcess

pytestmark = pytest.mark.slow

NUM_TRIES = 3
ATTACKS = {
    "memory": "{{ messages | slice(300000000) | list }}",
    "indent": "{{ messages | tojson(indent=2000000000) }}",
    "translate": "{{ ('a' * 9000 * 900).translate({97: 'x' * 1000}) | length }}",
    "tower": "{% set ns = namespace(x=3) %}{% for i in range(9) %}"
    "{% set ns.x = ns.x ** 999 %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
CALM = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    branches = [f"{{% elif attack == '{name}' %}}{text}" for name, text in ATTACKS.items()]
    path: Path = tmp_path_factory.mktemp("template") / "hostile.jinja"
    path.write_text(f"{{% if not attack %}}{CALM}{''.join(branches)}{{% endif %}}")
    model = str(ROOT / "headrace/demo/model")
    with ServerProcess("--model-path", model, "--chat-template", str(path), plain=True) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def prober(server: ServerProcess) -> Iterator[LivezProber]:
    with LivezProber(server) as prober:
        yield prober


def chat(server: ServerProcess, attack: str) -> httpx.Response:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is a mill?"}],
        "max_tokens": 8,
        "temperature": 0,
        "chat_template_kwargs": {"attack": attack},
    }
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=240)


def test_the_log_says_that_it_is_watched_and_why(server: ServerProcess) -> None:
    server.wait_for_line("is rendered in a process with limits: line 1 uses the filter slice")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_loop_and_the_streams_go_on(
    server: ServerProcess, prober: LivezProber, name: str
) -> None:
    solo, calm = greedy(server), chat(server, "")
    assert calm.status_code == 200
    before_kb = resident_kb(server.process.pid)
    found = []
    for _ in range(NUM_TRIES):
        with Neighbours(server) as neighbours, prober.period() as period:
            answer = chat(server, name)
        # On a busy machine it may not get the time that would show what it costs.
        assert answer.status_code in (400, 503)
        assert "chat template" in answer.json()["error"]["message"].lower()
        assert set(neighbours.texts) == {solo}
        found.append(period)
        if period.is_bearable:
            break
    assert found[-1].is_bearable, f"/livez took {', '.join(map(str, found))}"
    assert resident_kb(server.process.pid) - before_kb < 50_000
    again = chat(server, "").json()
    assert again["choices"] == calm.json()["choices"]
