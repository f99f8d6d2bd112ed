"""Counts the files of each package, their median length, and files that only one file imports.

Usage: `python -m tools.doors [--base REV]`. Every import statement in another file of the product
counts. Files that only registries load by name have no importer.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from tools.code_lines import PRODUCT, Source, files_here, files_of
from tools.import_circles import graph_of, module_name

SHORT_LINES = 60


def doors(files: Sequence[Source]) -> dict[str, tuple[int, float, int, int]]:
    """Return four numbers for each package.

    They are: its number of files, their median number of lines, the number of files under 60 lines,
    and the number of files that exactly one other file imports.

    Args:
        files: the files of the product; files `__init__.py` do not count.
    """
    sources = [each for each in files if each[0].suffix == ".py" and each[0].name != "__init__.py"]
    importers = Counter(name for found in graph_of(files, every=True).values() for name in found)
    lengths: dict[str, list[int]] = defaultdict(list)
    single: Counter[str] = Counter()
    for path, text in sources:
        lengths[path.parts[0]].append(text.count("\n"))
        single[path.parts[0]] += importers[module_name(path)] == 1
    return {
        package: (
            len(found),
            statistics.median(found),
            sum(length < SHORT_LINES for length in found),
            single[package],
        )
        for package, found in lengths.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line with these numbers for each package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="look at another revision")
    base = parser.parse_args(arguments).base
    sources = files_here(PRODUCT) if base is None else files_of(base)
    rows = doors([(path, text) for path, text in sources if path.parts[0] in PRODUCT])
    print(f"{'package':<16}{'files':>7}{'median':>8}{'short':>7}{'one importer':>14}")
    for package in PRODUCT:
        files, median, short, single = rows[package]
        print(f"{package:<16}{files:>7}{median:>8.0f}{short:>7}{single:>14}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
