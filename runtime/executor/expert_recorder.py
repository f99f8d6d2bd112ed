"""Counts how often each expert of a mixture-of-experts model is chosen, and writes the counts.

The counts stay on the device until they are written, so recording does not wait for the device. The
file formats are SGLang's; see `docs/experts.md`.
"""

from __future__ import annotations

import csv
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.config.options import RecorderMode
from runtime.errors import InvalidRequest
from runtime.executor.staging import to_device
from runtime.models.layers.expert_counts import ExpertCounts
from runtime.step.step_plan import StepPlan

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
_PREFIX = "expert_distribution_recorder"


@dataclass(frozen=True)
class _Pass:
    """One recorded step.

    Attributes:
        number: number of the step since recording began.
        counts: `[num_layers, num_experts]`, how often each expert was chosen.
        tokens: data about each token; empty unless it is kept.
        decoded: on the device, ids of the tokens that were sampled by earlier steps. Until the
            record is written, `tokens["input_ids"]` has -1 in their places.
    """

    number: int
    counts: Tensor
    tokens: dict[str, Any]
    decoded: Tensor


class ExpertRecorder:
    """Records the steps of one rank between `start` and `stop`.

    All ranks that share a layer choose the same experts for the same tokens. So the counts of one
    rank are complete.
    """

    def __init__(self, mode: RecorderMode, size: int, rank: int, counts: ExpertCounts) -> None:
        """Start without recording.

        Args:
            mode: which data about a step is kept.
            size: number of steps that are kept, the latest ones; -1 for all.
            rank: rank of this process.
            counts: the counters that the model's layers write to.
        """
        self._mode, self._size, self._rank, self._counts = mode, size, rank, counts
        self._passes: list[_Pass] = []
        self._num_steps = 0

    @property
    def is_on(self) -> bool:
        """Whether steps are being recorded."""
        return self._counts.is_on

    def start(self) -> None:
        """Delete the record, and record from the next step on."""
        self._forget()
        self._counts.is_on = True
        self._counts.keeps_ids = self._mode == "per_token"

    def stop(self) -> None:
        """Stop recording. The record stays until it is written or recording starts again."""
        self._counts.is_on = False

    def end_step(self, plan: StepPlan, latest_input: Tensor) -> None:
        """Add the step that was just launched to the record.

        Args:
            plan: the step's plan.
            latest_input: `BatchRows.latest_input` after this step.
        """
        counts, ids = self._counts.take()
        tokens: dict[str, Any] = {}
        if self._mode == "per_token":
            tokens = {
                "input_ids": plan.known_ids.tolist(),
                "positions": [
                    int(start) + offset
                    for start, length in zip(plan.start_lens, plan.query_lens, strict=True)
                    for offset in range(int(length))
                ],
                "extend_seq_lens": plan.query_lens.tolist(),
                "forward_mode": "DECODE" if plan.num_decodes == len(plan.rows) else "EXTEND",
                "topk_ids_of_layer": ids,
                "misc_objects": [],
            }
        decoded = latest_input[:0]
        if tokens and plan.num_decodes:
            (rows,) = to_device(latest_input.device, plan.rows[: plan.num_decodes])
            decoded = latest_input.index_select(0, rows)
        self._passes.append(_Pass(self._num_steps, counts, tokens, decoded))
        self._num_steps += 1
        if self._size > 0 and len(self._passes) > self._size:
            del self._passes[0]

    def dump(self) -> Path | None:
        """Write the record to a file and delete it.

        Returns:
            The file; `None` if another rank writes it.

        Raises:
            InvalidRequest: the folder is not writable.
        """
        passes = self._passes
        self._forget()
        if self._mode in ("stat", "stat_approx") and self._rank:
            return None
        folder = Path(os.environ.get(FOLDER_VARIABLE) or "/tmp")  # the reference's
        name = f"{_PREFIX}_{time.time()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._mode in ("stat", "stat_approx"):
                return self._write_counts(folder / f"{name}.pt", passes)
            return self._write_passes(folder / f"{name}_{self._rank}.pt", passes)
        except OSError as error:
            raise InvalidRequest(f"{folder} cannot be written to: {error.strerror}.") from error

    def _write_counts(self, path: Path, passes: list[_Pass]) -> Path:
        shape = self._counts.shape
        rows = max(self._size, len(passes))
        logical = torch.zeros(rows, *shape, dtype=torch.int64)
        for row, each in enumerate(passes):
            logical[row] = each.counts.cpu()
        made = {"rank": 0, "logical_count": logical, "average_utilization_rate_over_window": None}
        torch.save(made, path)
        _write_csv(path, logical.sum(dim=0))
        logger.info("Expert counts of %d steps written: %s", len(passes), path)
        return path

    def _write_passes(self, path: Path, passes: list[_Pass]) -> Path:
        num_layers, num_experts = self._counts.shape
        records = []
        for each in passes:
            record = {
                "forward_pass_id": each.number,
                "rank": self._rank,
                "gatherer_key": "primary",
                "global_physical_count": each.counts.cpu(),
                **each.tokens,
            }
            if "topk_ids_of_layer" in record:
                decoded = iter(each.decoded.tolist())
                known = record["input_ids"]
                record["input_ids"] = [one if one >= 0 else next(decoded) for one in known]
                record["topk_ids_of_layer"] = record["topk_ids_of_layer"].cpu()
            records.append(record)
        identity = torch.arange(num_experts).expand(num_layers, -1).clone()
        torch.save({"records": records, "last_physical_to_logical_map": identity}, path)
        total = torch.zeros(self._counts.shape, dtype=torch.int64)
        _write_csv(path, sum((record["global_physical_count"] for record in records), total))
        logger.info("Experts of %d steps written: %s", len(passes), path)
        return path

    def _forget(self) -> None:
        self._passes = []
        self._num_steps = 0
        self._counts.take()


def _write_csv(path: Path, total: Tensor) -> None:
    """Write the sums over all steps to a CSV file beside `path`, for `headrace experts`."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layer_id", "expert_id", "count"])
        for layer, counts in enumerate(total.tolist()):
            writer.writerows([layer, expert, count] for expert, count in enumerate(counts))
