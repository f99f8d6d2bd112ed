"""A load generator must not import the large packages of the server that it measures."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "numpy", "httpx", "triton")


def test_benchmarks_start_light() -> None:
    names = ", ".join(
        f"headrace.bench.{path.stem}"
        for path in sorted((ROOT / "headrace" / "bench").glob("*.py"))
        if path.stem not in ("__init__", "one_batch_worker")
    )
    code = f"import sys, {names}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
