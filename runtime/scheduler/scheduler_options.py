"""The scheduler's options."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.scheduler.budget import TokenBudget


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Bounds and rules of scheduling.

    Attributes:
        max_running_requests: rows of the running batch.
        max_queued_requests: most waiting requests; further ones are refused; `None` for no bound.
        context_len: most tokens of a request, prompt and output.
        token_budget: prompt tokens computed in one step.
        policy: name in `runtime.scheduler.waiting.POLICIES`.
        eos_token_ids: ids that end a text.
        stream_interval: tokens between two events of a stream.
        overlap: launch a step before the last one's tokens are read.
        num_adapter_slots: different adapters (LoRA) of one step; 0 if the server takes none.
        evicts_oldest: which adapter is overwritten first; see `AdapterPlaces`.
    """

    max_running_requests: int
    max_queued_requests: int | None = None
    context_len: int
    token_budget: TokenBudget
    policy: str = "fcfs"
    eos_token_ids: list[int]
    stream_interval: int = 1
    overlap: bool = False
    num_adapter_slots: int = 0
    evicts_oldest: bool = False
