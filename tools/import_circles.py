"""Finds circular imports between modules, and files directly in `runtime/`.

Usage: `python -m tools.import_circles [--base REV]`. Two kinds of circles are found. For circles
between modules, only imports count that are executed when a module is imported. For circles between
folders, every import counts, also inside functions and for a type checker, because a reader of the
code follows these too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from tools.code_lines import PRODUCT, Source, files_here, files_of

# Files that may be directly in `runtime/`: the package's `__init__.py`, and its errors.
_IN_NO_ROOM = {"__init__.py", "errors.py"}


def imports(source: str, *, every: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the imports of a file: a module, and the imported name in it (or an empty text).

    Only imports are yielded that are executed when the file is imported. With `every`, imports
    inside functions and for a type checker are yielded too.
    """
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not every:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) if not every:
                left += node.orelse
                continue
            case ast.Import():
                yield from ((alias.name, "") for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from ((module, alias.name) for alias in node.names)
        left += ast.iter_child_nodes(node)


def graph_of(files: Sequence[Source], *, every: bool = False) -> dict[str, set[str]]:
    """Return for each module among `files` the other modules that it imports; see `imports`."""
    sources = {module_name(path): text for path, text in files if path.suffix == ".py"}
    graph: dict[str, set[str]] = {}
    for name, text in sources.items():
        found = graph[name] = set()
        for module, member in imports(text, every=every):
            inner = f"{module}.{member}"
            found |= {inner if inner in sources else module} & sources.keys() - {name}
    return graph


def module_name(path: PurePosixPath) -> str:
    """Return the dotted name under which a file is imported."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def first_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle, or an empty list; the first module is also the last."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def circles_between_folders(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the circles between folders.

    A circle is a sorted list of modules in several folders, each of which imports all others
    directly or indirectly.
    """
    reached = {name: _reached(graph, name) for name in graph}
    found = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    folders = ({name.rpartition(".")[0] for name in circle} for circle in found)
    pairs = zip(found, folders, strict=True)
    return sorted(sorted(circle) for circle, inside in pairs if len(inside) > 1)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    left = [start]
    while left:
        for name in graph[left.pop()] - reached:
            reached.add(name)
            left.append(name)
    return reached


def loose_files(files: Sequence[Source]) -> list[str]:
    """Return the files that are directly in `runtime/` and not in one of its packages."""
    paths = [path for path, _ in files if path.parent == PurePosixPath("runtime")]
    return sorted(str(path) for path in paths if path.name not in _IN_NO_ROOM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results and return the exit status.

    The status is 1 if there is a circle between modules, or a file directly in `runtime/`.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="look at another revision")
    base = parser.parse_args(arguments).base
    sources = files_here() if base is None else files_of(base)
    files = [(path, text) for path, text in sources if path.parts[0] in PRODUCT]
    graph = graph_of(files)
    circle, loose = first_circle(graph), loose_files(files)
    print(f"{len(graph)} modules; circle: {' -> '.join(circle) or 'none'}")
    between = circles_between_folders(graph_of(files, every=True))
    print(f"{len(between)} circles between folders", *map(", ".join, between), sep="\n  ")
    print(f"{len(loose)} loose files in runtime/", *loose, sep="\n  ")
    return int(bool(circle or loose))


if __name__ == "__main__":
    sys.exit(main())
