"""Counts the files of each package, their median length, and files with one importer.

`python -m tools.doors [--base REV]`. A file has one importer when exactly one other file of the
product imports it, by any import; files that registries load by name have none and do not count.
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
    """Return for each package: files, median lines, files under 60 lines, files with one importer.

    Args:
        files: files of the product; `__init__.py` does not count.
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
    """Print a line for each package."""
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
