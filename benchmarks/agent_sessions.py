"""Measures the share of agents' prompts that a hybrid model's prefix cache finds.

    python -m benchmarks.agent_sessions --slots 24 40 64 96

The scheduler and the cache are those of the product. Random tokens replace a model's, because only
the bookkeeping is measured. Pages and slots have the sizes of Qwen3-Next 80B-A3B in bfloat16. A
slot holds a snapshot: the recurrent states after the tokens of a cached prefix.

Sessions of 24 turns run at the same time and share a system prompt. A turn adds a tool's result and
an answer. Every sixth turn branches: an earlier turn gets a new answer. In the middle of a session
a line of the system prompt changes, as a date or a list of files would.

The reusable tokens of a prompt are the whole pages that it shares with any earlier sequence,
without its last token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.h200.hybrids import write_config
from runtime.cache.manager import CacheManager
from runtime.checkpoint.model_spec import PagedState
from runtime.ipc.messages import GenerateRequest, TokenDeltas
from runtime.ipc.shared_state import SharedState
from runtime.models.registry import read_model_spec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.budget import TokenBudget
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from runtime.step.step_plan import MaskSource, StepPlan, StepResult

PAGE = 16
NUM_TURNS = 24
SYSTEM_TOKENS, LINE_AT = 3000, 2600
CONTEXT = 40_000


@dataclass
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class RandomRunner:
    """A runner that returns random tokens immediately."""

    def __init__(self) -> None:
        self._source = np.random.default_rng(0)

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> _Done:
        del masks
        tokens = self._source.integers(3, 50_000, len(plan.sample_rows)).astype(np.int32)
        return _Done(StepResult(tokens))


@dataclass
class Session:
    """The history of one agent's session."""

    source: np.random.Generator
    history: list[int]
    ends: list[int] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        """Return the next turn's prompt."""
        if turn == NUM_TURNS // 2:
            self.history[LINE_AT : LINE_AT + 8] = self.source.integers(3, 50_000, 8).tolist()
        if turn % 6 == 5:
            # An earlier turn gets a new answer.
            del self.history[self.ends[-3] :]
            del self.ends[-3:]
        self.ends.append(len(self.history))
        added = int(self.source.integers(60, 1400))
        self.history += self.source.integers(3, 50_000, added).tolist()
        return list(self.history)


class Server:
    """A scheduler with its cache, and a record of what they report."""

    def __init__(self, folder: Path, num_tokens: int, num_slots: int, chunk: int) -> None:
        slots = {"num_state_slots": num_slots, "max_running": 64} if num_slots else {}
        self.cache = CacheManager(num_tokens // PAGE, PAGE, **slots)
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.scheduler = Scheduler(
            RandomRunner(),
            self.cache,
            SchedulerStats(SharedState(folder / f"state-{num_slots}", create=True), 10**9),
            SchedulerOptions(
                max_running_requests=64,
                max_queued_requests=None,
                context_len=CONTEXT,
                token_budget=TokenBudget(chunk, chunk),
                policy="fcfs",
                eos_token_ids=[0],
                overlap=True,
            ),
            send_tokens=self._collect,
            send_front=lambda _: None,
        )

    def _collect(self, message: TokenDeltas) -> None:
        for start, cached in zip(message.starts, message.cached_tokens, strict=True):
            self.tokens[start.request_id], self.cached[start.request_id] = [], cached
        ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        for request_id, count in zip(message.request_ids, message.token_counts, strict=True):
            self.tokens[request_id] += ids[:count]
            del ids[:count]

    def add(self, request_id: int, prompt: list[int], num_new: int) -> None:
        sampling = SamplingParams(max_new_tokens=num_new, seed=1, ignore_eos=True)
        message = GenerateRequest(
            request_id=request_id,
            input_ids=np.array(prompt, dtype=np.int32).tobytes(),
            spec=RequestSpec(row=RowSpec(sampling=sampling)),
            arrival=float(request_id),
        )
        self.scheduler.receive([message])


def run(folder: Path, num_tokens: int, num_slots: int, num_sessions: int, chunk: int) -> Any:
    """Run all sessions.

    Returns:
        The reusable tokens, those of them that were found, the computed tokens, and the most
        snapshots at a time.
    """
    server = Server(folder, num_tokens, num_slots, chunk)
    system = np.random.default_rng(7).integers(3, 50_000, SYSTEM_TOKENS).tolist()
    sessions = [Session(np.random.default_rng(i), list(system)) for i in range(num_sessions)]
    # Hashes of all pages that any sequence had; a hash includes the tokens before the page.
    known: set[int] = set()
    reusable = found = computed = most = 0
    for turn in range(NUM_TURNS):
        wanted = {}
        for i, session in enumerate(sessions):
            request_id = turn * num_sessions + i + 1
            prompt = session.prompt(turn)
            wanted[request_id] = session, prompt
            server.add(request_id, prompt, int(session.source.integers(20, 300)))
        while server.scheduler.has_work:
            server.scheduler.step()
            if server.cache.states is not None:
                most = max(most, server.cache.states.num_snapshots)
        server.scheduler.rest()
        for request_id, (session, prompt) in wanted.items():
            keys = _pages(prompt[: len(prompt) - 1])
            shared = next((n for n, key in enumerate(keys) if key not in known), len(keys))
            reusable += shared * PAGE
            found += min(server.cached[request_id], shared * PAGE)
            computed += len(prompt) - server.cached[request_id]
            session.history += server.tokens[request_id]
            # The last token is never computed.
            known.update(_pages(session.history[:-1]))
    return reusable, found, computed, most


def _pages(tokens: list[int]) -> list[int]:
    keys, so_far = [], 0
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        so_far = hash((so_far, *tokens[start : start + PAGE]))
        keys.append(so_far)
    return keys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, nargs="+", default=[24, 40, 64, 96])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600_000, help="of the pool")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, 48)
        spec = read_model_spec(folder)
        slot = spec.state_slot_bytes(1, 2)
        paged = [state for state in spec.layer_states if isinstance(state, PagedState)]
        of_token = sum(4 * state.num_kv_heads * state.head_dim for state in paged)
        pages = args.tokens * of_token
        print(f"a slot {slot / 2**20:.0f} MiB, the pages {pages / 2**30:.1f} GiB")
        for num_slots in args.slots:
            reusable, found, computed, most = run(
                folder, args.tokens, num_slots, args.sessions, args.chunk
            )
            share = most * slot / (pages + num_slots * slot)
            rows.append({"slots": num_slots, "found": found / reusable, "memory": share})
            print(
                f"{num_slots} slots: {found / reusable:.1%} of {reusable} reusable tokens found, "
                f"{computed} computed; most snapshots {most}, {share:.1%} of pages and slots"
            )
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
