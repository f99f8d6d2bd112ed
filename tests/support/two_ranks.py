"""Two ranks of one model in two threads, which exchange tensors as processes would."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model
from tests.support.driver import Driver

_TIMEOUT_S = 60.0


class TwoRanks:
    """A model that is divided between two ranks, each with its own KV cache."""

    def __init__(self, folder: Path, overrides: dict[str, Any] | None = None) -> None:
        """Load the parts of both ranks."""
        self._parts: list[Tensor] = [torch.empty(0)] * 2
        self._barrier = Barrier(2, timeout=_TIMEOUT_S)
        spec = read_model_spec(folder, overrides)
        self.drivers = [
            Driver(load_model(folder, spec, self._context(rank), lambda share: None))
            for rank in range(2)
        ]

    def _context(self, rank: int) -> BuildContext:
        def joined(part: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
            self._parts[rank] = part
            self._barrier.wait()
            whole = join(self._parts)
            self._barrier.wait()
            return whole

        return BuildContext(
            dtype=torch.float32,
            device=torch.device("cpu"),
            tp_rank=rank,
            tp_size=2,
            all_reduce=lambda part: joined(part, lambda parts: parts[0] + parts[1]),
            gather_columns=lambda part: joined(part, lambda parts: torch.cat(parts, dim=1)),
        )

    def prefill(self, tokens: list[int], chunk: int | None = None) -> list[Tensor]:
        """Return the logits of all tokens, for each rank."""

        def run(driver: Driver) -> Tensor:
            return driver.prefill(driver.start(tokens), chunk)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(run, self.drivers))
