"""Counts of files that a reader must open."""

from pathlib import PurePosixPath

from tools.doors import doors


def test_files_lengths_and_single_importers() -> None:
    files = {
        "runtime/__init__.py": "",
        "runtime/a.py": "import runtime.b\n",
        "runtime/b.py": "x = 1\n" * 80,
        "runtime/c.py": "def late() -> None:\n    import runtime.d\n",
        "runtime/d.py": "import runtime.b\n",
        "server/e.py": "import runtime.d\n",
    }
    found = doors([(PurePosixPath(path), text) for path, text in files.items()])
    # `b` has two importers, `d` two, one of them late.
    assert found == {"runtime": (4, 1.5, 3, 0), "server": (1, 1, 1, 0)}
