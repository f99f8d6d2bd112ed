"""Options of the scheduler, derived from the server's options."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.scheduler.budget import TokenBudget


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits and rules of scheduling.

    Attributes:
        max_running_requests: most requests that run at the same time.
        max_queued_requests: most requests that wait; further requests are refused. `None` for no
            limit.
        context_len: most tokens of a request, prompt and output together.
        token_budget: limits on the prompt tokens of one step.
        policy: the order of the waiting queue: a name in `runtime.scheduler.waiting.POLICIES`.
        eos_token_ids: token ids that end an output.
        stream_interval: number of tokens between two events of a stream.
        overlap: launch each step before the tokens of the previous step are read.
        num_adapter_slots: most different LoRA adapters of one step; 0 if the server takes none.
        evicts_oldest: overwrite the adapter that was copied to the device first, instead of the
            least recently used one.
        num_stages: number of pipeline stages (`--pp-size`). As many steps are in flight.
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
    num_stages: int = 1
