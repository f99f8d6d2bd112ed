"""Modules do not import in circles, and each file of `runtime/` is in a package of the layers."""

from pathlib import PurePosixPath
from textwrap import dedent

import pytest

from tools.code_lines import PRODUCT, files_here
from tools.import_circles import (
    circles_between_folders,
    first_circle,
    graph_of,
    loose_files,
    main,
)

FILES = list(files_here(PRODUCT))


def test_there_is_no_circle_and_no_loose_file(capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(FILES)
    assert len(graph) > 500
    assert "runtime.cache.radix_tree" in graph["runtime.cache.manager"]
    assert first_circle(graph) == []
    assert loose_files(FILES) == []
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "circle: none\n" in out
    assert "\n0 loose files" in out


def test_circles_between_folders_are_explained() -> None:
    """Every import counts; `docs/decisions/0052-rooms.md` says why this one is left."""
    (circle,) = circles_between_folders(graph_of(FILES, every=True))
    assert {name.rpartition(".")[0] for name in circle} == {
        "runtime.models.layers",
        "runtime.models.quantization",
    }


def test_what_counts() -> None:
    files = {
        "runtime/a.py": "from runtime.room import b",
        "runtime/room/__init__.py": "",
        "runtime/room/b.py": """\
            from typing import TYPE_CHECKING

            if TYPE_CHECKING:
                from runtime.room.c import Thing


            class Later:
                import runtime.room.d


            def late() -> None:
                import runtime.a
        """,
        "runtime/room/c.py": "import runtime.room.b",
        "runtime/room/d.py": "try:\n    import runtime.room.c\nexcept ImportError:\n    pass",
        "runtime/errors.py": "",
    }
    sources = [(PurePosixPath(path), dedent(text)) for path, text in files.items()]
    graph = graph_of(sources)
    assert graph["runtime.a"] == {"runtime.room.b"}
    assert graph["runtime.room.b"] == {"runtime.room.d"}
    circle = first_circle(graph)
    assert circle[0] == circle[-1]
    assert {*circle} == {"runtime.room.b", "runtime.room.c", "runtime.room.d"}
    assert loose_files(sources) == ["runtime/a.py"]
