"""`headrace batch`: answers of every kind of line, and a stop that costs nothing."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.batch import main
from headrace.batch_files import BatchFileError, BatchOutput, read_lines
from headrace.demo import MODEL_PATH
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
OPTIONS = ["--model-path", str(MODEL_PATH), "--max-running-requests", "2"]
OPTIONS += ["--grammar-backend", "none"]


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
    assert said.getvalue() == f"headrace: {folder} is no regular file.\n"


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
    )
    target = tmp_path / "out.jsonl"
    said = io.StringIO()
    assert main(str(source), str(target), OPTIONS, said) == 1
    assert "5 of 8 failed" in said.getvalue()
    answers = records(target)
    assert answers[0]["id"] == "text"
    assert answers[0]["text"].startswith(" Paris")
    assert answers[0]["meta_info"]["completion_tokens"] == 8
    assert answers[1]["id"] == "chat"
    assert "4" in answers[1]["text"]
    assert [each["text"].split()[0] for each in answers[2]["outputs"]] == ["Tokyo.", "Tokyo."]
    for index, word in ((3, "JSON"), (4, "object"), (5, "temprature"), (6, "temperature")):
        assert word in answers[index]["error"]["message"]
    # Mended and asked again: only what failed is run.
    before = next(x for x in target.read_text().splitlines() if '"index": 0' in x)
    lines = source.read_text().splitlines()
    lines[3:] = [json.dumps({"text": "Hello", "sampling_params": GREEDY})]
    source.write_text("\n".join(lines))
    assert main(str(source), str(target), OPTIONS, said) == 0
    assert before in target.read_text()
    assert sorted(records(target)) == [0, 1, 2, 3]
    assert main(str(source), str(target), ["--model-path", "/absent"], said) == 0
    assert "Every request" in said.getvalue()


def test_it_goes_on_after_a_kill(tmp_path):
    requests = [
        {
            "id": number,
            "text": "Hello, my name is",
            "sampling_params": {"ignore_eos": True, "max_new_tokens": 192},
        }
        for number in range(40)
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
        torn.write('{"index": 39, "te')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "answered before" in done.stderr
    assert target.read_text().splitlines()[:4] == kept
    assert sorted(records(target)) == list(range(40))
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
    assert "no answer of this command" in said.getvalue()
    assert target.read_text() == '{"some": "thing"}\n'
    assert main(str(tmp_path / "absent"), str(target), OPTIONS, said) == 1


def test_the_command_line(capsys):
    from headrace.cli import main as command

    with pytest.raises(SystemExit):
        command(["batch", "--help"])
    assert "INPUT OUTPUT" in capsys.readouterr().out
