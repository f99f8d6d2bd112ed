"""Draws docstrings and paragraphs at random, to be read by somebody who does not know the project.

    python -m tools.draw_texts SEED [--docstrings 20] [--paragraphs 10]
        [--beside FOLDER ... --key FILE]

A docstring is printed with what stands above it: the docstring of its file, that of its class, and
its signature. A paragraph is printed with the title of its page and the heading of its section.
With `--beside`, as many docstrings are drawn from the packages in each group of folders, in mixed
order and without the project's name; FILE then says where each one comes from. So a reader applies
the same measure to this project and to others.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.code_lines import PRODUCT, ROOT

# Characters. Longer docstrings of other projects are tutorials, which a reader judges otherwise.
_MAX_BESIDE = 1500
# Characters that are printed of the docstrings of a file and of a class.
_MAX_ABOVE = 600
# Least words of a paragraph.
_MIN_WORDS = 15


def docstrings(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the docstring of each class and function, with what stands above it."""
    for path in sorted(each for folder in folders for each in folder.rglob("*.py")):
        tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
        above = f"FILE {path.name}\n" + _indented(ast.get_docstring(tree))
        yield from _within(tree, above, lines)


def _within(node: ast.AST, above: str, lines: list[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(child):
            signature = "\n".join(lines[child.lineno - 1 : child.body[0].lineno - 1])
            yield f'{above}ITEM:\n{signature}\n    """{text}"""'
        below = above
        if isinstance(child, ast.ClassDef):
            below += f"CLASS {child.name}\n" + _indented(ast.get_docstring(child))
        yield from _within(child, below, lines)


def _indented(text: str | None) -> str:
    return "".join(f"    {line}\n" for line in (text or "")[:_MAX_ABOVE].splitlines())


def paragraphs(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of the Markdown pages in `folder`, without code, tables and headings."""
    for path in sorted(folder.rglob("*.md")):
        title = section = ""
        text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for part in re.split(r"\n\s*\n", text):
            if part.startswith("# "):
                title = part.splitlines()[0]
            elif part.startswith("#"):
                section = part.splitlines()[0]
            body = "\n".join(line for line in part.splitlines() if not line.startswith("#"))
            if len(body.split()) >= _MIN_WORDS and body.lstrip()[0] not in "|<":
                yield f"PAGE {path.name} {title} {section}\nITEM:\n{body.strip()}"


def main() -> None:
    """Print a draw."""
    parser = argparse.ArgumentParser(prog="python -m tools.draw_texts", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--docstrings", type=int, default=20)
    parser.add_argument("--paragraphs", type=int, default=10)
    parser.add_argument(
        "--beside", action="append", nargs="+", type=Path, default=[], help="a group of folders"
    )
    parser.add_argument("--key", type=Path, help="where each item comes from")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    groups = {"ours": [ROOT / each for each in PRODUCT]}
    groups |= {group[0].name: group for group in arguments.beside}
    drawn = []
    for name, folders in groups.items():
        found = list(docstrings(folders))
        if arguments.beside:
            found = [each for each in found if len(each) < _MAX_BESIDE + 2 * _MAX_ABOVE]
        drawn += [(name, each) for each in draw.sample(found, arguments.docstrings)]
    if arguments.beside:
        draw.shuffle(drawn)
    else:
        found = list(paragraphs(ROOT / "docs"))
        drawn += [("docs", each) for each in draw.sample(found, arguments.paragraphs)]
    for number, (_, text) in enumerate(drawn, 1):
        print(f"===== {number} =====\n{text}\n")
    if arguments.key is not None:
        lines = [f"{number} {name}\n" for number, (name, _) in enumerate(drawn, 1)]
        arguments.key.write_text("".join(lines))


if __name__ == "__main__":
    main()
