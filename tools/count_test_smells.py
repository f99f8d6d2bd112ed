"""Counts how often tests use private names, and how often they sleep.

`python -m tools.count_test_smells [--base REV] [--list KIND]`. Three kinds of places are counted:

        private  `thing._name` and imports of such names, except for `self`, `cls` and named tuples
    patched  `setattr` of pytest's `monkeypatch` on a module or class of this repository
        slept    `sleep` for longer than zero

Two cases are not counted. A test that patches foreign code, such as `torch.cuda` for a machine
without a GPU, simulates a machine. A test that replaces a method of an object that it created does
not affect other tests.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tools.code_lines import OTHERS, PRODUCT, Source, files_here, files_of

KINDS = ("private", "patched", "slept")
_OURS = (*PRODUCT, *OTHERS)
_PUBLIC = {"_replace", "_asdict", "_fields", "_make"}
_OWN = {"self", "cls", "os", "sys"}


def places(source: str) -> Iterator[tuple[str, int]]:
    """Yield the kind and the line of each place in a test file that is counted.

    Raises:
        SyntaxError: the file is not Python.
    """
    tree = ast.parse(source)
    ours = {name for node in ast.walk(tree) for name in _imported_from_us(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner)) if owner in _OWN:
                pass
            case ast.Attribute(attr=name) if _is_private(name):
                yield "private", node.lineno
            case ast.ImportFrom(names=names):
                yield from (("private", node.lineno) for each in names if _is_private(each.name))
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, *_]):
                if _is_ours(target, ours):
                    yield "patched", node.lineno
            case ast.Call(func=ast.Attribute(attr="sleep"), args=[ast.Constant(value=0)]):
                pass
            case ast.Call(func=ast.Attribute(attr="sleep")):
                yield "slept", node.lineno


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in _PUBLIC


def _imported_from_us(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in _OURS:
            yield from (each.asname or each.name for each in names)
        case ast.Import(names=names):
            for each in names:
                if each.name.split(".")[0] in _OURS:
                    yield each.asname or each.name.split(".")[0]


def _is_ours(target: ast.expr, ours: set[str]) -> bool:
    if isinstance(target, ast.Constant):
        return str(target.value).split(".")[0] in _OURS
    while isinstance(target, ast.Attribute):
        target = target.value
    return isinstance(target, ast.Name) and target.id in ours


def count(sources: Iterable[Source]) -> Counter[str]:
    """Return the number of places of each kind in the files under `tests`."""
    return Counter(
        kind
        for path, text in sources
        if path.parts[0] == "tests" and path.suffix == ".py"
        for kind, _ in places(text)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts, or the places of one kind, and return the exit status.

    The status is 1 if the revision does not exist.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.count_test_smells", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--base", metavar="REV", help="a revision of git to compare with")
    parser.add_argument("--list", choices=KINDS, metavar="KIND", help="name the places instead")
    options = parser.parse_args(argv)
    here = list(files_here(["tests"]))
    if options.list is not None:
        for path, text in sorted(here):
            if path.suffix == ".py":
                lines = sorted(line for kind, line in places(text) if kind == options.list)
                print("\n".join(f"{path}:{line}" for line in lines), end="\n" if lines else "")
        return 0
    try:
        base = None if options.base is None else count(files_of(options.base))
    except subprocess.CalledProcessError:
        return 1
    now = count(here)
    for kind in KINDS:
        before = "" if base is None else f"{base[kind]:>8} ->"
        print(f"{kind:<8}{before}{now[kind]:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
