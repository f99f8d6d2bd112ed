"""Limits that keep the code small enough to read."""

import ast
from pathlib import Path

import pytest

from tools.code_lines import OTHERS, PRODUCT

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500


def sources(*folders: str) -> list[Path]:
    found = [p for f in folders for s in ("*.py", "*.cpp", "*.h") for p in (ROOT / f).rglob(s)]
    assert found
    return found


@pytest.mark.parametrize("folder", [*PRODUCT, *OTHERS])
def test_no_file_is_too_long(folder: str) -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in sources(folder)
        if (num_lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_no_grab_bag_files() -> None:
    # Users' notebooks import these by their names.
    allowed = {ROOT / "headrace" / "utils.py", ROOT / "headrace" / "srt" / "utils.py"}
    found = {p for p in sources(*PRODUCT, "recipes") if p.name in ("utils.py", "helpers.py")}
    assert found <= allowed


@pytest.mark.parametrize("folder", ["tests", "docs", "docker"])
def test_generic_folders_are_no_packages(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_kernels_stays_out_of_the_way_of_its_namesake() -> None:
    code = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(code) == 1, "a docstring and nothing else"
