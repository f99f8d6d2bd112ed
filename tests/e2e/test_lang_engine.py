"""Programs on an `Engine` of this process, without HTTP; one engine for the file."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace import Engine, EngineBackend, assistant, function, gen, select, user
from headrace.demo import MODEL_PATH
from headrace.lang.backend.choose import as_backend
from headrace.lang.chat_template import get_chat_template
from headrace.lang.program_errors import ProgramError
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=str(MODEL_PATH), max_total_tokens=4096) as found:
        yield found


@function
def capital(s, country):
    s += user(f"What is the capital of {country}?")
    s += assistant(gen("answer", max_tokens=12, temperature=0, return_logprob=True))


def test_an_engine_is_a_back_end(engine: Engine) -> None:
    state = capital.run("France", backend=engine)
    direct = engine.generate(
        state.text().partition("<|im_end|>\n<|im_start|>assistant")[0]
        + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        {"max_new_tokens": 12, "temperature": 0, "stop": ["<|im_end|>"]},
    )
    assert state["answer"] == direct["text"]
    assert state["answer"]
    assert state.usage().completion_tokens == direct["meta_info"]["completion_tokens"]
    assert "gen answer" in state.explain()


def test_streams_batches_and_several_answers(engine: Engine) -> None:
    whole = capital.run("Italy", backend=engine)["answer"]
    state = capital.run("Italy", backend=engine, stream=True)
    assert "".join(state.text_iter("answer")) == whole
    countries = [{"country": country} for country in ("Italy", "Spain", "Italy")]
    states = capital.run_batch(countries, backend=engine)
    assert [each.error() for each in states] == [None] * 3
    assert states[0]["answer"] == states[2]["answer"] == whole
    several = capital.run("Italy", backend=engine, n=2)
    assert several["answer"] == [whole, whole]


@pytest.mark.parametrize(
    "method",
    ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"],
)
def test_t54_select_and_its_scores(engine: Engine, method: str) -> None:
    @function
    def pick(s):
        s += user("Is water wet?")
        s += assistant("It is " + select("answer", ["yes", "no", "no"], choices_method=method))

    state = pick.run(backend=engine)
    assert state["answer"] in ("yes", "no")
    scores = state.get_meta_info("answer")["normalized_prompt_logprobs"]
    assert len(scores) == 3
    assert scores[1] == pytest.approx(scores[2], abs=1e-4)


def test_leaving_a_stream_aborts_its_request(engine: Engine) -> None:
    @function
    def endless(s):
        s += user("Count.")
        s += assistant(gen("numbers", max_tokens=2000, ignore_eos=True, stop=[]))

    pieces = iter(endless.run(backend=engine, stream=True).text_iter("numbers"))
    assert next(pieces)
    pieces.close()
    # It is refused while requests run.
    until(lambda: headrace.flush_cache(engine), 20)


def test_t69_a_bad_parameter_is_the_programs_error(engine: Engine) -> None:
    state = capital.run("France", backend=engine, top_p=7.0)
    with pytest.raises(ProgramError, match="top_p"):
        _ = state["answer"]
    assert capital.run("France", backend=engine)["answer"]


def test_the_default_back_end_and_information(engine: Engine) -> None:
    before = headrace.global_config.default_backend
    headrace.set_default_backend(engine)
    try:
        assert capital("France")["answer"]
        info = headrace.get_server_info()
        assert info is not None
        assert info["model_path"] == str(MODEL_PATH)
        assert headrace.flush_cache() is True
    finally:
        headrace.set_default_backend(before)


def test_a_record_of_an_engine_replays_without_it(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    recording = headrace.RecordingBackend(engine, path)
    state = capital.run("Norway", backend=recording)
    state.sync()
    recording.shutdown()
    again = capital.run("Norway", backend=headrace.ReplayBackend(path))
    assert again.text() == state.text()
    assert again.explain().count("\n") == state.explain().count("\n")


def test_the_page_shows_tokens_and_probabilities(engine: Engine, tmp_path: Path) -> None:
    state = capital.run("Peru", backend=engine, return_text_in_logprobs=True)
    state.sync()
    state.explain(html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    entries = state.get_meta_info("answer")["output_token_logprobs"]
    assert page.count("class='token'") == len(entries)


def test_an_engine_has_one_back_end(engine: Engine) -> None:
    assert as_backend(engine) is as_backend(engine)
    assert EngineBackend(engine, "chatml").get_chat_template() is get_chat_template("chatml")


def test_the_blocks_of_the_page_run_in_order(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "lang_backends.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("is Paris.", "is Rome.", "gen answer", "1 request: "):
        assert wanted in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"record.jsonl", "trace.html"}
