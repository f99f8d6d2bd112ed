"""`headrace batch`: answers to every kind of line, and a stop that loses no answer."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from headrace.batch import main
from headrace.batch_files import BatchFileError, BatchOutput, read_lines
from headrace.demo import MODEL_PATH
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.tiny_models import tiny_bert
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
OPTIONS = ["--model-path", str(MODEL_PATH), "--max-running-requests", "2"]
OPTIONS += ["--grammar-backend", "none"]
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
RESULT = {"content": '{"degrees": 21}'}
OLD_CALL = [
    {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    {"role": "function", "name": "weather", **RESULT},
]


def called(**call: object) -> list[dict]:
    return [
        {"role": "assistant", "tool_calls": [{"id": "c", **call}]},
        {"role": "tool", "tool_call_id": "c", "name": "weather", **RESULT},
    ]


CALLED = called(type="function", function=OLD_CALL[0]["function_call"])
CUSTOM_CALL = called(type="custom", custom={"name": "weather", "input": "in Paris, if you please"})


def write(path: Path, *requests: object) -> Path:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def records(path: Path) -> dict[int, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_index = {record["index"]: record for record in found}
    assert len(by_index) == len(found), "a request was answered twice"
    return by_index


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_is_no_output(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, said = write(tmp_path / "in.jsonl", {"text": "x"}), io.StringIO()
    assert main(str(source), folder, OPTIONS, said) == 1
    assert said.getvalue() == f"headrace: {folder} is not a regular file.\n"


def test_every_kind_of_line(tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        {"id": "text", "text": "The capital of France is", "sampling_params": GREEDY},
        {"custom_id": "chat", "messages": [{"role": "user", "content": "What is 2 * 2?"}]},
        {"prompt": "The capital of Japan is", "sampling_params": {**GREEDY, "n": 2}},
        "not json",
        "[1]",
        {"id": 5, "text": "x", "sampling_params": {"temprature": 0}},
        {"text": "x", "temperature": 0},
        {"messages": [], "text": "x"},
        {"messages": [*ASKED, *OLD_CALL], "sampling_params": GREEDY},
        {"messages": [*ASKED, *CALLED], "sampling_params": GREEDY},
        {"messages": [*ASKED, *CUSTOM_CALL], "sampling_params": GREEDY},
        {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
    )
    target = tmp_path / "out.jsonl"
    said = io.StringIO()
    assert main(str(source), str(target), OPTIONS, said) == 1
    assert "6 of 12 failed" in said.getvalue()
    answers = records(target)
    assert answers[0]["id"] == "text"
    assert answers[0]["text"].startswith(" Paris")
    assert answers[0]["meta_info"]["completion_tokens"] == 8
    assert answers[1]["id"] == "chat"
    assert "4" in answers[1]["text"]
    assert [each["text"].split()[0] for each in answers[2]["outputs"]] == ["Tokyo.", "Tokyo."]
    for index, word in ((3, "JSON"), (4, "object"), (5, "temprature"), (6, "temperature")):
        assert word in answers[index]["error"]["message"]
    # Earlier calls are shown to the model in whichever form they come.
    old, new, custom = (answers[index] for index in (8, 9, 10))
    assert old["text"] == new["text"]
    num_tokens = new["meta_info"]["prompt_tokens"]
    assert old["meta_info"]["prompt_tokens"] == num_tokens
    assert custom["meta_info"]["prompt_tokens"] > num_tokens
    assert "messages[1].tool_calls[0]" in answers[11]["error"]["message"]
    # Mended and asked again: only what failed is run.
    before = next(x for x in target.read_text().splitlines() if '"index": 0' in x)
    lines = source.read_text().splitlines()
    lines[3:] = [json.dumps({"text": "Hello", "sampling_params": GREEDY})]
    source.write_text("\n".join(lines))
    assert main(str(source), str(target), OPTIONS, said) == 0
    assert before in target.read_text()
    assert sorted(records(target)) == [0, 1, 2, 3, 8, 9, 10]
    assert main(str(source), str(target), ["--model-path", "/absent"], said) == 0
    assert "Every request" in said.getvalue()


def openai_line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Tokyo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@needs_grammars
def test_lines_of_openais_batch_files(tmp_path):
    short = {"temperature": 0, "max_tokens": 48}
    source = write(
        tmp_path / "in.jsonl",
        openai_line("chat", CHAT, messages=ASK, **short),
        openai_line("tool", CHAT, messages=ASK, tools=[WEATHER], tool_choice="required", **short),
        openai_line("text", COMPLETIONS, prompt="The capital of France is", **short),
        openai_line("both", COMPLETIONS, prompt=["Hello", "Hello"], n=2, **short),
        # A line of ours beside them keeps its own form.
        {"id": "ours", "text": "Hello", "sampling_params": GREEDY},
        openai_line("refused", CHAT, messages=ASK, max_tokens=-1),
        openai_line("vector", "/v1/embeddings", input="Hello"),
        openai_line("elsewhere", "/v1/moderations", input="Hello"),
        openai_line("stream", CHAT, messages=ASK, stream=True),
        {"custom_id": "get", "method": "GET", "url": CHAT, "body": {}},
        {"custom_id": "no body", "method": "POST", "url": CHAT},
        {"method": "POST", "url": CHAT, "body": {}},
        openai_line("more", CHAT) | {"priority": 1},
    )
    target = tmp_path / "out.jsonl"
    options = [*OPTIONS[:4], "--grammar-backend", BACKENDS[0]]
    said = io.StringIO()
    assert main(str(source), str(target), options, said) == 1
    assert "8 of 13 failed" in said.getvalue()
    found = [json.loads(line) for line in target.read_text().splitlines()]
    (ours,) = (each for each in found if each.get("id") == "ours")
    assert ours["text"]
    answers = {each["custom_id"]: each for each in found if "custom_id" in each}
    assert len(answers) == 12
    for each in answers.values():
        # What OpenAI's output files hold, and nothing else.
        assert set(each) == {"id", "custom_id", "response", "error"}
    bodies = {}
    for custom_id in ("chat", "tool", "text", "both"):
        response = answers[custom_id]["response"]
        assert answers[custom_id]["error"] is None
        assert set(response) == {"status_code", "request_id", "body"}
        assert response["status_code"] == 200
        bodies[custom_id] = response["body"]
    parsed = ChatCompletion.model_validate(bodies["chat"])
    assert "Paris" in parsed.choices[0].message.content
    (call,) = ChatCompletion.model_validate(bodies["tool"]).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Tokyo")
    assert bodies["text"]["choices"][0]["text"].startswith(" Paris")
    assert [choice["index"] for choice in bodies["both"]["choices"]] == [0, 1, 2, 3]
    # Refused as the server refuses it.
    for custom_id, word in (("refused", "max_tokens"), ("vector", "generates text")):
        response = answers[custom_id]["response"]
        assert response["status_code"] == 400
        assert word in response["body"]["error"]["message"]
    for custom_id, word in (
        *(("elsewhere", "url must be one of /v1/chat/completions"), ("stream", "stream")),
        *(("get", "method must be POST"), ("no body", "body must be"), (None, "custom_id")),
        ("more", "priority"),
    ):
        assert answers[custom_id]["response"] is None
        assert word in answers[custom_id]["error"]["message"]
    # Asked again, what was answered stays and the others run.
    kept = [line for line in target.read_text().splitlines() if '"status_code": 200' in line]
    source.write_text("\n".join(source.read_text().splitlines()[:6]) + "\n")
    assert main(str(source), str(target), options, said) == 1
    assert "5 already answered, 1 to go" in said.getvalue()
    after = target.read_text().splitlines()
    assert set(kept) < set(after)
    assert len(after) == 6


def test_embeddings_of_openais_batch_files(tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        openai_line("one", "/v1/embeddings", input="The wheel"),
        openai_line("two", "/v1/embeddings", input=["The wheel", "turns"]),
    )
    target = tmp_path / "out.jsonl"
    options = ["--model-path", str(tiny_bert("bert")), "--num-threads", "1"]
    assert main(str(source), str(target), options, io.StringIO()) == 0
    answers = {each["custom_id"]: each for each in map(json.loads, target.open())}
    one, two = (answers[name]["response"]["body"]["data"] for name in ("one", "two"))
    assert len(one[0]["embedding"]) > 8
    assert one[0]["embedding"] == pytest.approx(two[0]["embedding"], abs=1e-5)


def test_it_goes_on_after_a_kill(tmp_path):
    requests = [
        {
            "id": number,
            "text": "Hello, my name is",
            "sampling_params": {"ignore_eos": True, "max_new_tokens": 192},
        }
        for number in range(20)
    ]
    source = write(tmp_path / "in.jsonl", *requests)
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "headrace.cli", "batch", str(source), str(target), *OPTIONS]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    until(lambda: target.exists() and target.read_text().count("\n") >= 4, 90)
    assert process.poll() is None, "it ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = target.read_text().splitlines()[:4]
    with target.open("a") as torn:
        torn.write('{"index": 19, "te')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "already answered" in done.stderr
    assert target.read_text().splitlines()[:4] == kept
    assert sorted(records(target)) == list(range(20))
    assert not list(tmp_path.glob("*.resuming"))


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_text('{"index": 0, "id": "a", "text": ""}\n')
    source = write(tmp_path / "in.jsonl", {"id": "b", "text": "x"})
    with BatchOutput(target) as output, pytest.raises(BatchFileError, match="another input"):
        output.has(next(read_lines(source)))
    target.write_text('{"some": "thing"}\n')
    said = io.StringIO()
    assert main(str(source), str(target), OPTIONS, said) == 1
    assert "was not written by this command" in said.getvalue()
    assert target.read_text() == '{"some": "thing"}\n'
    assert main(str(tmp_path / "absent"), str(target), OPTIONS, said) == 1


def test_the_command_line(capsys):
    from headrace.cli import main as command

    with pytest.raises(SystemExit):
        command(["batch", "--help"])
    assert "INPUT OUTPUT" in capsys.readouterr().out
