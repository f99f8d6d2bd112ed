"""Run a file of cells in one process, as a script or as a notebook does.

`python -m tests.support.notebook FILE script` runs the cells one after the other;
`... notebook` runs them inside an event loop that is running already, as Jupyter's kernel does.
`MODEL_PATH` in a cell is the bundled demo model.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from headrace.demo import MODEL_PATH

SEPARATOR = "# %%\n"


def read_cells(path: Path) -> list[str]:
    """The cells of a file."""
    return [cell.strip() for cell in path.read_text().split(SEPARATOR) if cell.strip()]


def run_cells(cells: list[str]) -> None:
    """Execute `cells` in one namespace; each begins with a line `[cell N]`."""
    names: dict[str, Any] = {"__name__": "__main__", "MODEL_PATH": str(MODEL_PATH)}
    for number, cell in enumerate(cells, 1):
        print(f"[cell {number}]", flush=True)
        exec(compile(cell, f"<cell {number}>", "exec"), names)


async def _inside_a_loop(cells: list[str]) -> None:
    run_cells(cells)


if __name__ == "__main__":
    found = read_cells(Path(sys.argv[1]))
    if sys.argv[2] == "notebook":
        asyncio.run(_inside_a_loop(found))
    else:
        run_cells(found)
