"""Finds circular imports between modules, and files directly in `runtime/`.

`python -m tools.import_circles [--base REV]`. The first kind of circle counts imports that
importing a module executes: those of the module and of its classes. Circles between folders count
every import, including those inside functions and for a type checker, because a reader follows
these, too.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from tools.code_lines import PRODUCT, Source, files_here, files_of

# Files that are outside all packages by design: the package itself, its errors.
_IN_NO_ROOM = {"__init__.py", "errors.py"}


def imports(source: str, *, every: bool = False) -> Iterator[tuple[str, str]]:
    """Yield a file's imports that importing it executes: a module, and perhaps a name in it.

    With `every`, yield also imports that run later or are only for a type checker.
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
    """Return the modules among `files`, each with the ones that it imports; see `imports`."""
    sources = {module_name(path): text for path, text in files if path.suffix == ".py"}
    graph: dict[str, set[str]] = {}
    for name, text in sources.items():
        found = graph[name] = set()
        for module, member in imports(text, every=every):
            inner = f"{module}.{member}"
            found |= {inner if inner in sources else module} & sources.keys() - {name}
    return graph


def module_name(path: PurePosixPath) -> str:
    """Return the name under which a file is imported."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def first_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle, the first one also at the end; empty without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def circles_between_folders(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return sorted sets of modules of several folders, in which each module reaches all."""
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
    """Return files of `runtime/` that are outside its packages."""
    paths = [path for path, _ in files if path.parent == PurePosixPath("runtime")]
    return sorted(str(path) for path in paths if path.name not in _IN_NO_ROOM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results; return 1 if there is a circle of executed imports, or a loose file."""
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
