"""The LiteLLM back end against a stand-in for the package, and names that refer to others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import Crusoe, LiteLLM, VertexAI, assistant, function, gen, select, user
from headrace.lang.program_errors import ProgramError

# What the package has of its surface that is used: one coroutine, and answers as OpenAI's.
STAND_IN = """
from types import SimpleNamespace as N

asked = []

class Refused(Exception):
    status_code = 404
    message = "no such model"

def usage():
    return N(prompt_tokens=9, completion_tokens=3, prompt_tokens_details=N(cached_tokens=4))

async def pieces():
    for text in ("Pa", "ris", None):
        yield N(id="c", usage=None, choices=[N(delta=N(content=text), finish_reason=None)])
    yield N(id="c", usage=usage(), choices=[])

async def acompletion(**kwargs):
    asked.append(kwargs)
    if kwargs["model"] == "none":
        raise Refused()
    if kwargs.get("stream"):
        return pieces()
    text = '{"choice": "no"}' if "response_format" in kwargs else "Paris"
    choice = N(message=N(content=text), finish_reason="stop")
    return N(id="c", usage=usage(), choices=[choice])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "litellm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    import litellm

    yield litellm
    monkeypatch.delitem(sys.modules, "litellm", raising=False)


@function
def ask(s):
    s += user("France?")
    s += assistant(gen("answer", max_tokens=7))


def test_a_request_and_its_answer(package: Any) -> None:
    backend = LiteLLM("groq/llama-3-8b-instruct", api_key="k", base_url="http://x", max_retries=1)
    state = ask.run(backend=backend)
    assert state["answer"] == "Paris"
    (asked,) = package.asked
    assert asked["messages"] == [{"role": "user", "content": "France?"}]
    assert (asked["model"], asked["max_tokens"]) == ("groq/llama-3-8b-instruct", 7)
    assert (asked["api_key"], asked["base_url"], asked["max_retries"]) == ("k", "http://x", 1)
    assert "top_k" not in asked
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (9, 4, 3)
    assert backend.get_chat_template().name == "llama-3-instruct"


def test_a_stream(package: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = ask.run(backend=LiteLLM("openai/a-model"), stream=True)
    # Markup is not sent, so that of an unknown model is no matter.
    assert not caplog.records
    assert "".join(state.text_iter("answer")) == "Paris"
    assert state.get_meta_info("answer")["completion_tokens"] == 3


def test_select_and_refusals(package: Any) -> None:
    @function
    def pick(s):
        s += user("Sure?")
        s += assistant(select("sure", ["yes", "no"]))

    assert pick.run(backend=LiteLLM("openai/qwen2-instruct"))["sure"] == "no"
    state = ask.run(backend=LiteLLM("none"))
    with pytest.raises(ProgramError, match="404: no such model"):
        _ = state["answer"]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "litellm.py").write_text("raise ModuleNotFoundError('none', name='litellm')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import headrace\n"
        "try: headrace.LiteLLM('m')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install litellm" in done.stdout


@pytest.mark.parametrize(("kind", "words"), [(VertexAI, "LiteLLM"), (Crusoe, "CRUSOE_API_KEY")])
def test_names_of_the_reference_say_what_to_use(kind: Any, words: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"use OpenAI\(.*{words}"):
        kind("a-model")
