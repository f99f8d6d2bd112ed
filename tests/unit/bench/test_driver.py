"""The behaviour that all benchmarks share, tested with a toy benchmark."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bench.driver import Benchmark, Run
from headrace.cli import BENCHMARKS
from headrace.cli import main as headrace
from runtime.errors import HeadraceError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=1)


def toy(measure: Callable[[Run], int], *, starts_engine: bool = True) -> Benchmark:
    return Benchmark("toy", "A toy.", add_options, measure, starts_engine)


def measure(run: Run) -> int:
    run.say(f"size {run.options.size}")
    run.say("twice", "and more")
    run.write({"size": run.options.size}, seen=True)
    return 3


def test_figures_follow_the_line_about_the_machine_and_are_kept(tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "out.json"
    arguments = ["--size", "7", "--output-file", str(path), "--tp-size", "2"]
    assert toy(measure).main(arguments) == 3
    machine, *figures = capsys.readouterr().out.splitlines()
    assert "headrace" in machine
    assert figures == ["size 7", "twice", "and more"]
    content = json.loads(path.read_text())
    assert content["benchmark"] == "toy"
    assert content["environment"]["cores"] >= 1
    assert content["options"] == {"shape": None, "output_file": "out.json", "size": 7}
    assert content["server_options"] == ["--tp-size", "2"]
    assert content["result"] == {"size": 7}
    assert content["seen"] is True


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert toy(measure).main([]) == 3
    assert not list(tmp_path.iterdir())


def test_a_failure_is_one_line(capsys) -> None:
    def fail(_: Run) -> int:
        raise HeadraceError("It cannot.")

    assert toy(fail).main([]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "headrace bench: It cannot.\n")


def test_ctrl_c_is_the_shells_status(capsys) -> None:
    def stop(_: Run) -> int:
        raise KeyboardInterrupt

    assert toy(stop).main([]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_without_an_engine_other_options_are_refused(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        toy(measure, starts_engine=False).main(["--tp-size", "2"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "unrecognized arguments: --tp-size 2" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_is_a_command_with_help(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        headrace(["bench", name, "--help"])
    assert ended.value.code == 0
    assert f"usage: headrace bench {name}" in capsys.readouterr().out


def test_the_command_lists_them(capsys) -> None:
    with pytest.raises(SystemExit):
        headrace(["bench", "--help"])
    out = capsys.readouterr().out
    assert [name for name in BENCHMARKS if f"\n    {name}" in out] == list(BENCHMARKS)
