"""On a server's PYTHONPATH, breaks the device in a step when the file `PLANTED_FAULT` exists.

The content of the file names the kind of fault. `raise` raises an error with CUDA's message, for
machines without a GPU. `assert` and `access` really break the context of a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

_RUNNER = "runtime.executor.model_runner"


def _plant(path: str) -> None:
    while not hasattr(sys.modules.get(_RUNNER), "ModelRunner"):
        time.sleep(0.02)
    runner: Any = sys.modules[_RUNNER].ModelRunner
    compute = runner._compute

    def compute_or_break(*args: Any, **options: Any) -> Any:
        if os.path.exists(path):
            with open(path) as file:
                _break(file.read())
        return compute(*args, **options)

    runner._compute = compute_or_break


def _break(kind: str) -> None:
    import torch

    if kind == "raise":
        raise RuntimeError("CUDA error: device-side assert triggered")
    if kind == "assert":
        # The device finds this error later than the host launches it.
        torch._assert_async(torch.zeros(1, device="cuda"))
    if kind == "access":
        numbers = torch.zeros(4, device="cuda")
        from lost_device_kernel import write_far_away

        write_far_away(numbers)


if path := os.environ.get("PLANTED_FAULT"):
    threading.Thread(target=_plant, args=(path,), daemon=True).start()
