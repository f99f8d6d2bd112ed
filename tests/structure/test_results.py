"""Every measured figure names its source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/results/h200"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_names_its_machine_and_a_commit(path: Path) -> None:
    environment = json.loads(path.read_text())["environment"]
    assert environment["gpus"]
    assert all(name.startswith("NVIDIA H200") for name in environment["gpus"])
    # A copy that lacked its history told another one; the same code is known by this.
    commit = environment.get("commit_in_history", environment["commit"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", commit)
