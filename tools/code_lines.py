"""Prints the lines of code of each package, and the difference from another revision.

`python -m tools.code_lines [--base REV] [--depth N]`. A line counts if it holds code: blank lines,
comments, docstrings and import statements do not count. A statement over several lines counts as
several.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("kernels", "runtime", "openai_api", "anthropic_api", "ollama_api", "server", "headrace")
OTHERS = ("recipes", "tools", "benchmarks", "examples", "docs", "tests")
SUFFIXES = (".py", ".cpp", ".h")
CPP = " (C++)"

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Literals are matched too, so that text in them that looks like a comment stays.
_CPP_PART = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)

Position = tuple[int, int]
Source = tuple[PurePosixPath, str]


def python_lines(source: str) -> int:
    """Return the number of lines of code in a Python file.

    Raises:
        SyntaxError: the file is not Python.
    """
    left_out = sorted(_left_out(ast.parse(source)), reverse=True)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NOT_CODE or token.string == ";":
            continue
        # `ast` counts columns in bytes.
        begin = (token.start[0], len(token.line[: token.start[1]].encode()))
        while left_out and left_out[-1][1] <= begin:
            left_out.pop()
        if not left_out or begin < left_out[-1][0]:
            lines.update(range(token.start[0], token.end[0] + 1))
    # `str.splitlines` would also split at the form feed and other characters of a string.
    texts = source.split("\n")
    return sum(1 for line in lines if texts[line - 1].strip())


def _left_out(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    for node in ast.walk(tree):
        match node:
            # A string expression statement is documentation, wherever it is.
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def cpp_lines(source: str) -> int:
    """Return the number of lines of code in a C++ file, without comments and `#include` lines."""

    def without_comment(part: re.Match[str]) -> str:
        text = part.group()
        return "\n" * text.count("\n") if text.startswith(("//", "/*")) else text

    lines = map(str.strip, _CPP_PART.sub(without_comment, source).split("\n"))
    return sum(1 for line in lines if line and not line.startswith("#include"))


def count(sources: Iterable[Source], depth: int = 1) -> Counter[str]:
    """Return the lines of code of each package; C++ counts separately, as `kernels (C++)`.

    Args:
        sources: for each file its path from the root of the repository, and its text.
        depth: number of folders that make up a package's name.
    """
    counts: Counter[str] = Counter()
    for path, text in sources:
        package = "/".join(path.parts[:-1][:depth])
        if path.suffix == ".py":
            counts[package] += python_lines(text)
        else:
            counts[package + CPP] += cpp_lines(text)
    return counts


def files_here(folders: Sequence[str] = (*PRODUCT, *OTHERS)) -> Iterator[Source]:
    """Yield the files in `folders` of this working tree, with their texts."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES:
                yield PurePosixPath(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def files_of(revision: str) -> Iterator[Source]:
    """Yield the files of a revision of the repository, with their texts.

    Raises:
        subprocess.CalledProcessError: the revision does not exist.
    """
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision], stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.suffix in SUFFIXES and path.parts[0] in (*PRODUCT, *OTHERS):
                file = archive.extractfile(member)
                assert file is not None, "a source is a plain file"
                yield path, file.read().decode("utf-8")


def table(now: Counter[str], base: Counter[str] | None = None) -> list[str]:
    """Return a table with a line for each package: first the product, then tests and tools.

    Each of the two groups ends with its sum.

    Args:
        now: lines of code by package.
        base: lines of code by package of another revision, to compare with.
    """
    head = ("package", "now") if base is None else ("package", "base", "now", "change")
    rows = [head]

    def add(name: str, before: int, after: int) -> None:
        change = () if base is None else (f"{before:,}", f"{after - before:+,}")
        rows.append((name, *change[:1], f"{after:,}", *change[1:]))

    then = base or Counter()
    for title, folders, suffix in (
        ("product", PRODUCT, ""),
        ("product" + CPP, PRODUCT, CPP),
        ("beside it", OTHERS, ""),
    ):
        names = [
            name
            for folder in folders
            for name in sorted(now | then)
            if name.removesuffix(CPP).split("/")[0] == folder and name.endswith(CPP) == bool(suffix)
        ]
        for name in names:
            add(name, then[name], now[name])
        add(f"= {title}", sum(then[name] for name in names), sum(now[name] for name in names))
    width = max(len(row[0]) for row in rows)
    return [row[0].ljust(width) + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status, which is 1 if the revision does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tools.code_lines", description=__doc__)
    parser.add_argument("--base", metavar="REV", help="a revision of git to compare with")
    parser.add_argument("--depth", type=int, default=1, help="folders of a package's name")
    options = parser.parse_args(argv)
    try:
        base = None if options.base is None else count(files_of(options.base), options.depth)
    except subprocess.CalledProcessError:
        return 1
    print("\n".join(table(count(files_here(), options.depth), base)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
