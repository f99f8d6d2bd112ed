"""A scheduler with a `HashRunner`, which notices wrong pages; collects the scheduler's messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtime.cache.manager import CacheManager
from runtime.ipc.messages import FinishReason, GenerateRequest, RequestError, TokenDeltas
from runtime.ipc.shared_state import SharedState
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.budget import TokenBudget
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from tests.support.hash_runner import HashRunner, StagedHashRunner, next_token

PAGE = 4


class Harness:
    def __init__(self, folder: Path, **options: Any) -> None:
        settings_ = {
            "num_pages": 64,
            "rows": 8,
            "context_len": 128,
            "token_budget": 16,
            "policy": "fcfs",
            "overlap": False,
            "num_stages": 1,
            "max_queued": None,
            "prefix_cache": True,
            "cache": CacheManager,
            "states": {},
        } | options
        self.cache = settings_["cache"](
            settings_["num_pages"],
            PAGE,
            enable_prefix_cache=settings_["prefix_cache"],
            **settings_["states"],
        )
        self.runner = HashRunner(
            settings_["num_pages"], PAGE, settings_["rows"], settings_["context_len"]
        )
        self.staged = StagedHashRunner(self.runner, settings_["num_stages"])
        self.shared = SharedState(folder / "state", create=True)
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.replies: list[Any] = []
        self.scheduler = Scheduler(
            self.runner if settings_["num_stages"] == 1 else self.staged,
            self.cache,
            SchedulerStats(self.shared, 10**9),
            SchedulerOptions(
                max_running_requests=settings_["rows"],
                max_queued_requests=settings_["max_queued"],
                context_len=settings_["context_len"],
                token_budget=TokenBudget(settings_["token_budget"], settings_["token_budget"]),
                policy=settings_["policy"],
                eos_token_ids=[0],
                overlap=settings_["overlap"],
                num_stages=settings_["num_stages"],
            ),
            send_tokens=self._collect,
            send_front=self._hear,
        )

    def _hear(self, message: Any) -> None:
        if isinstance(message, RequestError):
            for request_id in message.request_ids:
                assert request_id not in self.reasons, "ended twice"
                assert request_id not in self.tokens, "the detokenizer knows it"
                self.reasons[request_id] = FinishReason(
                    "abort", message=message.message, status_code=500
                )
        self.replies.append(message)

    def _collect(self, message: TokenDeltas) -> None:
        for start, cached in zip(message.starts, message.cached_tokens, strict=True):
            assert start.request_id not in self.tokens, "announced twice"
            self.tokens[start.request_id] = []
            self.cached[start.request_id] = cached
        ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        for request_id, count in zip(message.request_ids, message.token_counts, strict=True):
            assert request_id not in self.reasons, "a token came after the end"
            self.tokens[request_id] += ids[:count]
            ids = ids[count:]
        for end in message.ends:
            assert end.request_id not in self.reasons, "ended twice"
            self.reasons[end.request_id] = end.reason

    def add(self, request_id: int, prompt: list[int], max_new: int, **sampling: Any) -> None:
        namespace = sampling.pop("namespace", "")
        priority = sampling.pop("priority", 0)
        spec = RequestSpec(
            row=RowSpec(sampling=SamplingParams(max_new_tokens=max_new, seed=1, **sampling)),
            cache_namespace=namespace,
            priority=priority,
        )
        self.send(request_id, prompt, spec)

    def send(self, request_id: int, prompt: list[int], spec: RequestSpec) -> None:
        message = GenerateRequest(
            request_id=request_id,
            input_ids=np.array(prompt, dtype=np.int32).tobytes(),
            spec=spec,
            arrival=float(request_id),
        )
        self.scheduler.receive([message])

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.scheduler.step()
        assert not self.scheduler.has_work, "the scheduler never came to rest"
        self.scheduler.step()
        self.scheduler.check_when_idle()


def expected(prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(np.array(sequence, dtype=np.int32)))
    return sequence[len(prompt) :]
