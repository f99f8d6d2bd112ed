"""Log lines reach standard error, and processes never wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from runtime.ipc.standard_error import QueuedText
from tests.support.server import python_path

LOST = re.compile(
    r"^\d\d:\d\d:\d\d WARNING \[here\] (\d+) lines of the log were lost", re.MULTILINE
)


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[str]]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(reader, "rb") as source, os.fdopen(writer, "w") as sink:
        yield source, sink
        # A writer that still waits must end with its pipe, not in the next test's.
        os.set_blocking(source.fileno(), False)
        with contextlib.suppress(OSError):
            while source.read(2**20):
                pass


def queued(stream: IO[str], max_bytes: int = 2**20) -> QueuedText:
    made = QueuedText(stream, max_bytes)
    made.process_name = "here"
    return made


def read_until(source: IO[bytes], pattern: str) -> str:
    os.set_blocking(source.fileno(), False)
    text = ""
    while not re.search(pattern, text, re.MULTILINE):
        assert select.select([source], [], [], 30)[0], text[-500:]
        text += (source.read(2**16) or b"").decode()
    return text


def test_lines_come_whole_and_in_order(pipe: tuple[IO[bytes], IO[str]]) -> None:
    source, sink = pipe
    stream = queued(sink)
    print("one", 1, file=stream)
    stream.write("two")
    stream.write(" parts\n")
    stream.write("no end")
    stream.flush()
    stream.drain()
    assert read_until(source, "no end") == "one 1\ntwo parts\nno end"


def test_a_pipe_that_nobody_reads_holds_nobody(pipe: tuple[IO[bytes], IO[str]]) -> None:
    source, sink = pipe
    stream = queued(sink, max_bytes=10_000)
    done = threading.Event()

    def log() -> None:
        for number in range(5000):
            stream.write(f"line {number}\n")
        stream.drain(0.1)
        done.set()

    threading.Thread(target=log, daemon=True).start()
    assert done.wait(60), "the writer waits for a reader"
    text = read_until(source, "were lost")
    (lost,) = LOST.findall(text)
    numbers = [int(line[5:]) for line in text.splitlines() if line.startswith("line ")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + int(lost) == 5000
    # What the pipe and the queue hold, and not all.
    assert 1000 <= len(numbers) <= 2500
    stream.write("afterwards\n")
    assert "lost" not in read_until(source, "afterwards")


def test_a_full_device_costs_the_lines_only(pipe: tuple[IO[bytes], IO[str]]) -> None:
    source, sink = pipe
    with open("/dev/full", "w") as full:  # its descriptor is exchanged below
        stream = queued(full)
        for number in range(100):
            stream.write(f"{number}\n")
        stream.drain(30)
        # The device has room again.
        os.dup2(sink.fileno(), full.fileno())
        stream.write("room\n")
        text = read_until(source, "were lost")
        assert text.startswith("room\n")
        assert LOST.findall(text) == ["100"]
        stream.drain(30)


@pytest.mark.parametrize("end", ["pass", "leave_at_once(0)", "raise SystemExit(0)"])
def test_the_last_lines_of_a_process(end: str, tmp_path: Path) -> None:
    script = f"""
import logging, os, warnings
from runtime.ipc.logging import configure_logging
from runtime.ipc.standard_error import leave_at_once
configure_logging("info", "child")
warnings.warn("careful")
for number in range(2000):
    logging.info("line %d", number)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        timeout=60,
    )
    lines = done.stderr.splitlines()
    assert "careful" in done.stderr
    assert [line.split("] ")[1] for line in lines[-2000:]] == [f"line {n}" for n in range(2000)]
