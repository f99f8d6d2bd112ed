"""Plot, JSON and options of the serving benchmark."""

import importlib
import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.bench import serving
from headrace.bench.environment import describe_environment, options_of, write_json
from headrace.bench.plot import check_plot_path, draw, write_plot
from headrace.bench.progress import Progress
from headrace.bench.record import RequestRecord
from headrace.cli import BENCHMARKS
from runtime.errors import StartupError


def records(count: int = 30) -> list[RequestRecord]:
    return [
        RequestRecord(
            index=index,
            started=100 + index * 0.1,
            finished=101 + index * 0.1,
            event_times=[100.5 + index * 0.1, 101 + index * 0.1],
            event_tokens=[1, 2],
            output_tokens=3,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 30, 900])
def test_a_plot_is_wellformed_and_stays_inside(count: int) -> None:
    root = ElementTree.fromstring(draw("a < b", records(count)))
    height = float(root.get("height", "0"))
    assert root.tag.endswith("svg")
    for element in root.iter():
        numbers = re.findall(r"-?\d+\.?\d*", element.get("d", ""))
        assert all(-1 <= float(number) <= height for number in numbers)


def test_plots_are_written_by_their_suffix(tmp_path: Path) -> None:
    write_plot(tmp_path / "a" / "x.svg", "title", records())
    write_plot(tmp_path / "x.html", "title", records())
    assert (tmp_path / "a" / "x.svg").read_text().startswith("<svg")
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    with pytest.raises(StartupError, match=r"\.svg, \.html, \.png"):
        check_plot_path(tmp_path / "x.pdf")


def test_json_holds_no_key_and_no_folder(tmp_path: Path) -> None:
    options = serving.SERVING.parser().parse_args(
        ["--api-key", "secret", "--output-file", str(tmp_path / "out.json")]
    )
    content = {"options": options_of(options), "rate": math.inf, "none": None, "third": 1 / 3}
    write_json(tmp_path / "out.json", content)
    text = (tmp_path / "out.json").read_text()
    assert "secret" not in text
    assert str(tmp_path) not in text
    loaded = json.loads(text)
    assert loaded["rate"] == "inf"
    assert loaded["third"] == pytest.approx(1 / 3, abs=1e-6)


def test_the_environment_names_machine_and_versions() -> None:
    environment = describe_environment()
    assert environment["cores"] >= 1
    assert "torch" in environment["packages"]
    assert environment["commit"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--max-concurrency", "0"],
        ["--max-concurrency", "2", "--num-client-processes", "3"],
        ["--goodput", "ttft"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft:-1"],
        ["--extra-body", "{"],
        ["--extra-body", "[]"],
        ["--plot", "x.pdf"],
        ["--url", "ftp://x"],
        ["--random-text"],
        ["--backend", "openai-chat"],
        ["--url", "http://127.0.0.1:9"],
        ["--url", "http://127.0.0.1:99999"],
        ["--url", "http://127.0.0.1:port"],
        ["--timeout", "0"],
        ["--warmup-requests", "-1"],
        ["--vocab-size", "1"],
        ["--dataset-name", "shared-prefix", "--prefix-len", "-4"],
        ["--output-details"],
        ["--output-file", f"{__file__}/out.json"],
        ["--output-file", "/"],
        ["--plot", f"{__file__}/out.svg"],
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], capsys) -> None:
    assert serving.main([*arguments, "--num-prompts", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace bench: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_server_that_is_not_there_is_named(capsys) -> None:
    assert serving.main(["--url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "headrace bench: http://127.0.0.1:9 cannot be reached: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["offline", "latency", "one-batch"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(name: str, capsys) -> None:
    main = importlib.import_module(BENCHMARKS[name][1]).main
    # There is no such model either, which would be said first if anything had begun.
    assert main(["--model-path", "/none", "--output-file", f"{__file__}/out.json"]) == 1
    assert "--output-file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["offline", "latency", "one-batch"])
def test_an_unknown_option_is_told_by_the_benchmark(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(BENCHMARKS[name][1]).main(["--tp-sise", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "headrace bench: error: unknown option --tp-sise; did you mean --tp-size? (see --help)\n"
    )


def test_objectives() -> None:
    assert serving.objectives(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    assert serving.objectives(None) is None


def test_progress_is_silent_where_nobody_watches() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream=stream)
    progress.add(2)
    progress.close()
    assert stream.getvalue() == ""


def test_progress_ends_full() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(2, stream=stream)
    progress.add()
    progress.add()
    progress.close()
    assert "2/2" in stream.getvalue()
    assert stream.getvalue().endswith("\n")
