"""`select` against our server: one request, one prefill, as the classic calls decide."""

from __future__ import annotations

from typing import Any

import pytest

import headrace as sgl
from tests.support.server import ServerProcess, common_server

METHODS = [
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
]
CHOICES = ["wheat", "barley and oats", "nothing at all"]


class Recording(sgl.RuntimeEndpoint):
    """Writes down what it asks; one that is `classic` has never heard of the scoring route."""

    def __init__(self, url: str, *, is_classic: bool = False) -> None:
        super().__init__(url, chat_template_name="chatml")
        self.is_classic = is_classic
        self.asked: list[str] = []

    async def post(self, path: str, payload: dict[str, Any]) -> Any:
        self.asked.append(path)
        if self.is_classic and path == "/v1/select":
            raise sgl.BackendError("Not Found", status=404)
        return await super().post(path, payload)


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


@sgl.function
def choose(s: sgl.ProgramState, text: str, method: str) -> None:
    s += text
    s += sgl.select("choice", CHOICES, choices_method=method)


def test_one_request_and_one_prefill(server: ServerProcess) -> None:
    server.client.post("/flush_cache?timeout=10").raise_for_status()
    endpoint = Recording(server.url)
    text = "Of all that the miller grinds, what does the baker of the village like best? " * 3
    state = choose.run(text, METHODS[0], backend=endpoint)
    assert state["choice"] in CHOICES
    assert endpoint.asked == ["/v1/select"]
    info = state.get_meta_info("choice")
    assert sum(info["probs"]) == pytest.approx(1)
    own = sum(map(len, info["input_token_logprobs"]))
    assert info["cached_tokens"] == 0
    # A page has 16 tokens: two further choices compute what lies beside the last whole one.
    assert info["prompt_tokens"] < info["computed_tokens"] + own
    assert info["computed_tokens"] <= info["prompt_tokens"] + own + 2 * 16
    again = choose.run(text, METHODS[0], backend=endpoint)
    assert again["choice"] == state["choice"]
    assert again.get_meta_info("choice")["computed_tokens"] <= own + 3 * 16


@pytest.mark.parametrize("method", METHODS)
# Where no choice, or every one, begins inside of the prompt's last token.
@pytest.mark.parametrize("text", ["The miller grinds", "The miller grinds:"])
def test_the_classic_calls_decide_alike(server: ServerProcess, method: str, text: str) -> None:
    ours, classic = Recording(server.url), Recording(server.url, is_classic=True)
    found = choose.run(text, method, backend=ours)
    other = choose.run(text, method, backend=classic)
    assert found["choice"] == other["choice"]
    mine, theirs = (
        state.get_meta_info("choice")["input_token_logprobs"] for state in (found, other)
    )
    for one, another in zip(mine, theirs, strict=True):
        assert [entry[1] for entry in one] == [entry[1] for entry in another]
        for entry, same in zip(one, another, strict=True):
            assert entry[0] == pytest.approx(same[0], abs=1e-3)
    num_classic = 2 + (method == METHODS[2])
    assert classic.asked == ["/v1/select", *["/generate"] * num_classic]
    # It is asked once.
    assert choose.run(text, method, backend=classic)["choice"] == other["choice"]
    assert classic.asked[num_classic + 1 :] == ["/generate"] * num_classic
