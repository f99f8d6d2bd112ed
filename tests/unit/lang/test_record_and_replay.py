"""A back end's answers are recorded, and replayed without it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import (
    BaseBackend,
    RecordingBackend,
    ReplayBackend,
    assistant,
    function,
    gen,
    image,
    select,
    user,
)
from headrace.lang.chat_template import get_chat_template
from headrace.lang.choices import ChoicesDecision
from headrace.lang.program_errors import ProgramError


class Counting(BaseBackend):
    """Numbers its answers, so that no two are the same."""

    support_api_speculation = True
    caches_prefixes = True

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = get_chat_template("qwen")
        self.prefixes: list[str] = []
        self._number = 0
        self._lock = threading.Lock()

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def get_model_name(self) -> str:
        return "counting"

    def generate(self, s: Any, sampling_params: Any) -> Any:
        number = self._next()
        return f"answer {number}", {"id": number, "completion_tokens": 2}

    def generate_stream(self, s: Any, sampling_params: Any) -> Any:
        number = self._next()
        yield "answer ", {"id": number, "completion_tokens": 1}
        yield str(number), {"id": number, "completion_tokens": 2}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        return ChoicesDecision(choices[self._next() % len(choices)], {"scores": [0.5]})

    def fill_turn(self, s: Any, parts: Any) -> Any:
        gens = [part for part in parts if part.sampling_params is not None]
        return [(f"part {self._next()}", {"id": 1}) for _ in gens]

    def cache_prefix(self, prefix_str: str) -> None:
        self.prefixes.append(prefix_str)


@function
def program(s, question, picture=None):
    s += user(question if picture is None else image(picture) + question)
    s += assistant(gen("answer", stop="\n"))
    s += user("Sure?")
    s += assistant(select("sure", ["yes", "no"]))


@function(num_api_spec_tokens=8)
def filled(s):
    s += user("?")
    s += assistant("A:" + gen("a", stop="\n") + "\nB:" + gen("b", stop="\n"))


def told(state: Any) -> Any:
    return state.text(), state.messages(), state.get_meta_info("answer"), state["sure"]


def test_a_program_gets_the_same_from_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    questions = [{"question": question} for question in ("one", "two", "one", "three")]
    recording = RecordingBackend(Counting(), path)
    first = [told(state) for state in program.run_batch(questions, backend=recording)]
    streamed = program.run("streamed", backend=recording, stream=True)
    pieces = "".join(streamed.text_iter("answer"))
    seen = program.run("look", picture=b"\x89PNG\r\n\x1a\n" + b"x" * 9, backend=recording)
    look = told(seen)
    parts = filled.run(backend=recording)
    turn = (parts["a"], parts["b"], parts.text())
    recording.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["answer ", pieces.removeprefix("answer ")] in [line.get("pieces") for line in lines]

    replay = ReplayBackend(path)
    assert replay.get_model_name() == "counting"
    assert replay.get_chat_template() == get_chat_template("qwen")
    # One after the other this time: what is asked twice comes in the order that it came.
    again = [told(program.run(**each, backend=replay)) for each in questions]
    assert sorted(again, key=str) == sorted(first, key=str)
    state = program.run("streamed", backend=replay, stream=True)
    assert "".join(state.text_iter("answer")) == pieces == state["answer"]
    assert (
        told(program.run("look", picture=b"\x89PNG\r\n\x1a\n" + b"x" * 9, backend=replay)) == look
    )
    parts = filled.run(backend=replay)
    assert (parts["a"], parts["b"], parts.text()) == turn
    assert replay.num_left == 0

    used_up = program.run("one", backend=replay)
    with pytest.raises(ProgramError, match=r"no answer any more to this generate request"):
        _ = used_up["answer"]
    other = program.run("one", temperature=0.5, backend=ReplayBackend(path))
    with pytest.raises(ProgramError, match="no answer to this generate request"):
        _ = other["answer"]
    repeating = ReplayBackend(path, repeat=True)
    texts = [program.run("two", backend=repeating).text() for _ in range(3)]
    assert len(set(texts)) == 1


def test_the_file_is_json_lines_that_say_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    recording = RecordingBackend(Counting(), path)
    program.run("one", backend=recording, temperature=0.25).sync()
    # Every line is whole before the program ends.
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    recording.shutdown()
    assert (head["format"], head["model"]) == ("headrace.lang.record", "counting")
    assert [line["asked"]["kind"] for line in lines] == ["generate", "select"]
    assert lines[0]["asked"]["sampling"]["temperature"] == 0.25
    assert lines[0]["asked"]["text"].endswith("<|im_start|>assistant\n")
    assert lines[1]["asked"]["choices"] == ["yes", "no"]


def test_prefixes_reach_the_back_end_that_is_recorded(tmp_path: Path) -> None:
    inner = Counting()
    recording = RecordingBackend(inner, tmp_path / "record.jsonl")
    recording.cache_prefix("once upon a time")
    recording.shutdown()
    assert inner.prefixes == ["once upon a time"]


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", "not json\n", '{"format": "x"}\n'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.jsonl is not a record of a back end"):
        ReplayBackend(path)
