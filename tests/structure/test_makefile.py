"""The Makefile's own words and what its targets run."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHONY = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def make(*arguments: str) -> str:
    # A make that runs these tests would have this one name its folder.
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_tells_of_every_target() -> None:
    assert PHONY is not None
    told = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", make("help"), re.MULTILINE))
    assert set(told) == set(PHONY.group(1).split())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("test", {"-n"}),
        ("test-long", {"-n", "--long"}),
        ("test-fast", {"-n", "tests/unit", "tests/structure"}),
        ("test-page", {"tests/page"}),
        ("test-gpu", {"tests/gpu"}),
    ],
)
def test_what_is_tested(target: str, words: set[str]) -> None:
    # Nothing is run, and nothing counts as due for installation.
    printed = make("-n", "-o", ".venv/installed-dev", target, "ARGS=-k radix")
    (command,) = (line for line in printed.splitlines() if " pytest " in line)
    assert words <= set(command.split())
    folders = {word for word in words if word.startswith("tests/")}
    assert {word for word in command.split() if word.startswith("tests/")} == folders
    assert command.endswith(" -k radix")
