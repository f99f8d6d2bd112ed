"""torch without its functions for meta tensors, in a new process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from runtime.worker.light_torch import META, import_torch
import_torch()
import torch
import runtime.worker.build_worker
assert not set(META) & set(sys.modules)
assert torch.nn.functional.silu(torch.zeros(2)).tolist() == [0, 0]
import runtime.models.transformers_impl.model
assert set(META) <= set(sys.modules)
with torch.device("meta"):
    # Its meta function is one of those in Python.
    assert torch.linalg.cholesky(torch.eye(3)).shape == (3, 3)
"""


def test_meta_tensors_are_known_where_they_are_needed() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
