"""Runs a file of cells in one process, as a script or as a notebook would.

`python -m tests.support.notebook FILE script` runs the cells one after the other. `... notebook`
runs them inside a running event loop, as Jupyter's kernel does. Cells may use these names:
`MODEL_PATH` is the bundled demo model, and `VISION_PATH` the demo model for images. `MOE_PATH` and
the names in `_SMALL_MODELS` are tiny random models. `IMAGE_URL` is a picture on this machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.demo import MODEL_PATH, VISION_MODEL_PATH
from headrace.utils import terminate_process

# For each name in a cell, the variant in `tests.support.tiny_text_models`.
_SMALL_MODELS = {
    "EMBEDDING_PATH": "qwen2",
    "RERANKER_PATH": "xlm_roberta_scores",
    "REWARD_PATH": "llama_scores",
}

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ROOT / "tests" / "e2e" / "documents"
SEPARATOR = "# %%\n"
_PICTURE = ROOT / "examples" / "vision" / "drawing.png"


def read_cells(path: Path) -> list[str]:
    """Return the cells of a file."""
    return [cell.strip() for cell in path.read_text().split(SEPARATOR) if cell.strip()]


def run_cells(cells: list[str]) -> None:
    """Run cells in one namespace; each cell begins with a line `[cell N]`."""
    names: dict[str, Any] = {
        "__name__": "__main__",
        "MODEL_PATH": str(MODEL_PATH),
        "VISION_PATH": str(VISION_MODEL_PATH),
        "IMAGE_URL": _PICTURE.as_uri(),
    }
    for name, variant in _SMALL_MODELS.items():
        if any(name in cell for cell in cells):
            from tests.support.tiny_text_models import text_model

            names[name] = str(text_model(variant))
    if any("MOE_PATH" in cell for cell in cells):
        from tests.support.tiny_models import tiny_model

        names["MOE_PATH"] = str(tiny_model("qwen2_moe"))
    try:
        for number, cell in enumerate(cells, 1):
            print(f"[cell {number}]", flush=True)
            code = compile(cell, f"<cell {number}>", "exec")
            exec(code, names)
    except BaseException:
        # Servers are stopped, because they would keep the pipes of the waiting process open.
        for value in list(names.values()):
            if isinstance(value, subprocess.Popen):
                terminate_process(value)
        raise


async def _inside_a_loop(cells: list[str]) -> None:
    run_cells(cells)


def run_document(name: str, mode: str) -> tuple[str, str]:
    """Run the cells of a document in a separate process; return its output and its errors."""
    path = str(DOCUMENTS / f"{name}.cells")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.notebook", path, mode],
        cwd=ROOT,
        # Documents must not download models.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": tempfile.mkdtemp(prefix="experts-"),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


if __name__ == "__main__":
    # Answers are sampled with a fixed seed, so that they are the same each time.
    secrets.randbits = random.Random(0).getrandbits  # type: ignore[assignment]
    # A new file object keeps the cells' output apart from that of a server.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    found = read_cells(Path(sys.argv[1]))
    if sys.argv[2] == "notebook":
        asyncio.run(_inside_a_loop(found))
    else:
        run_cells(found)
