"""What counts as a line of code, and the table of it."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from textwrap import dedent

import pytest

from tools.code_lines import count, cpp_lines, python_lines, table

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("x = 1\n\n\n# a comment\ny = 2  # another\n", 2),
        ('"""A module\'s docstring.\n\nOf three lines.\n"""\n', 0),
        ("import a\nfrom b import (\n    c,\n    d,\n)\n", 0),
        ("from __future__ import annotations\n\nif TYPE_CHECKING:\n    import a\n", 1),
        ('def f() -> None:\n    """A docstring.\n\n    More.\n    """\n', 1),
        ('class A:\n    """A docstring."""\n\n    x: int = 0\n    """What `x` is."""\n', 2),
        # A statement over several lines, with a comment and a blank line inside.
        ("x = [\n    1,\n\n    # why\n    2,\n]\n", 4),
        # A string that is used is code; its blank line is still blank.
        ('x = """first\n\n# no comment\n"""\n', 3),
        ('name = "n"\nx = f"""{name}\n{name}\n"""\n', 4),
        # What lines have in common with code counts with it.
        ('def f(): "A docstring."; return 1\n', 1),
        ('x = "é"; import a\n', 1),
        ('"""é"""; import a; x = 1\n', 1),
        ("import a; import b\n", 0),
        ("x = 1 + \\\n    2\n", 2),
        ("@decorated\nasync def f(\n    a: int,\n) -> int:\n    return a\n", 5),
        ('x = "\\f\x0c"\ny = 1\n', 2),
        ("if a:\n    ...\n", 2),
    ],
)
def test_lines_of_python(source: str, lines: int) -> None:
    assert python_lines(source) == lines


def test_lines_of_cpp() -> None:
    source = """\
    // A comment.
    #include <vector>
    #pragma once

    /* A longer
       comment. */
    int f(int x) {  // why
        const char* text = "// none, /* nor this";
        char quote = '"';  /* one */ return x; /* two */
        /* */
    }
    """
    assert cpp_lines(dedent(source)) == 5


def test_packages_are_cut_at_a_depth_and_cpp_is_apart() -> None:
    sources = [
        (PurePosixPath("kernels/__init__.py"), ""),
        (PurePosixPath("kernels/cpu/linear.py"), "x = 1\n"),
        (PurePosixPath("kernels/cpu/linear.cpp"), "int x;\nint y;\n"),
        (PurePosixPath("runtime/cache/pool/pages.py"), "x = 1\ny = 2\nz = 3\n"),
    ]
    assert count(sources) == {"kernels": 1, "kernels (C++)": 2, "runtime": 3}
    assert count(sources, depth=2) == {
        "kernels": 0,
        "kernels/cpu": 1,
        "kernels/cpu (C++)": 2,
        "runtime/cache": 3,
    }


def test_the_table_compares_and_sums_each_group() -> None:
    now = Counter({"kernels": 10, "kernels (C++)": 4, "headrace": 2_000, "tools": 30})
    base = Counter({"kernels": 12, "server": 5, "headrace": 2_000})
    lines = [line.split() for line in table(now, base)]
    assert lines == [
        ["package", "base", "now", "change"],
        ["kernels", "12", "10", "-2"],
        ["server", "5", "0", "-5"],
        ["headrace", "2,000", "2,000", "+0"],
        ["=", "product", "2,017", "2,010", "-7"],
        ["kernels", "(C++)", "0", "4", "+4"],
        ["=", "product", "(C++)", "0", "4", "+4"],
        ["tools", "0", "30", "+30"],
        ["=", "beside", "it", "0", "30", "+30"],
    ]
    assert [line.split() for line in table(now)][1] == ["kernels", "10"]


def run(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.code_lines", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_command_compares_with_a_revision(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("__init__.py", "code_lines.py"):
        (tmp_path / "tools" / name).write_text((ROOT / "tools" / name).read_text())
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "fast.cpp").write_text("int x;\n")
    product = tmp_path / "runtime" / "cache.py"
    product.parent.mkdir()
    product.write_text('"""Pages."""\nx = 1\n')
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    product.write_text('"""Pages."""\nx = 1\ny = 2\n')
    done = run("--base", "HEAD", root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^runtime +1 +2 +\+1$", done.stdout, re.MULTILINE)
    assert re.search(r"^kernels \(C\+\+\) +1 +1 +\+0$", done.stdout, re.MULTILINE)


def test_a_revision_that_is_not_there_is_said() -> None:
    done = run("--base", "no-such-revision")
    assert done.returncode == 1
    assert "no-such-revision" in done.stderr
    assert not done.stdout
