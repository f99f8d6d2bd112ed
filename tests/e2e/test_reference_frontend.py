"""The reference's own frontend runs the same programs against our server, with the same answers.

`HEADRACE_SGLANG_FRONTEND` names the folders that hold `sglang` 0.5.9 (its wheel, unpacked) and what
its frontend imports, joined by colons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.lang import run_job
from tests.support.server import ServerProcess

FOLDERS = os.environ.get("HEADRACE_SGLANG_FRONTEND", "")
pytestmark = pytest.mark.skipif(not FOLDERS, reason="needs HEADRACE_SGLANG_FRONTEND")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as made:
        yield made.wait_ready()


@pytest.mark.parametrize(("job", "num"), [("kinds", 1), ("batch", 16), ("select", 8)])
def test_the_same_answers(server: ServerProcess, job: str, num: int) -> None:
    ours = run_job(server.url, job, num, "headrace", "")["answers"]
    theirs = run_job(server.url, job, num, "sglang", FOLDERS)["answers"]
    assert ours == theirs
    assert all(ours)
