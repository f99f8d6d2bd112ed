"""Simulates agent sessions over many replicas, with our router, scheduler and cache.

    python -m benchmarks.fleet [--replicas 64] [--sessions 512] [--json out.json]

All code except the model is the product's: each replica is a `Scheduler` with its `CacheManager`,
and `Router` chooses among them. A step's duration is computed from its plan with figures that were
measured on an H200 with the 8B shape in bfloat16 (`benchmarks/results/h200/README.md`): 42,500
prompt tokens per second, and 4.1 ms for a decode step, plus 25 microseconds for each further row.
All times in the report are simulated.

A session is that of an agent. It begins with a system text, which all sessions of one kind share.
Each turn sends the whole conversation with the previous answer and a tool's result. A tool runs
between turns. One turn in eight returns to an earlier turn (a branch). One session in sixteen
changes a line of its system text half-way; nothing after this line can then be reused.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.environment import describe_environment, write_json
from runtime.cache.manager import CacheManager
from runtime.client.replica_link import ReplicaLink
from runtime.client.replica_router import Router
from runtime.ipc.messages import GenerateRequest, TokenDeltas
from runtime.ipc.shared_state import SharedState
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.budget import TokenBudget
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from runtime.step.step_plan import MaskSource, StepPlan, StepResult

METHODS = ("cache_aware", "total_requests", "round_robin")
PROMPT_TOKENS_PER_S = 42_500
DECODE_STEP_S = 0.0041
ROW_S = 0.000_025
PAGE_SIZE = 16
ROWS = 256
CHUNK = 8192
VOCAB_SIZE = 100_000


class _Pending:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class TimedRunner:
    """A runner that returns the same token for every row and computes a step's duration."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> _Pending:
        del masks
        num_prompt = plan.num_tokens - plan.num_decodes
        self.step_s = max(
            num_prompt / PROMPT_TOKENS_PER_S, DECODE_STEP_S if plan.num_decodes else 0.0
        )
        self.step_s += plan.num_decodes * ROW_S
        return _Pending(StepResult(np.full(len(plan.sample_rows), 7, dtype=np.int32)))


@dataclass
class Turn:
    """One request of a session.

    Attributes:
        prompt: token ids.
        reusable: number of tokens at its beginning that an earlier request of the fleet also had.
        num_output: tokens to generate.
    """

    prompt: list[int]
    reusable: int
    num_output: int


@dataclass
class Session:
    """An agent's conversation, which yields one turn at a time."""

    draw: random.Random
    system: list[int]
    num_turns: int
    changes: bool
    history: list[list[int]] = field(default_factory=list)

    def turns(self) -> Iterator[Turn]:
        """Yield each turn; the next one is requested after this one has its answer."""
        conversation, reusable = list(self.system), len(self.system)
        for number in range(self.num_turns):
            if self.history and self.draw.random() < 1 / 8:
                conversation = list(self.draw.choice(self.history))
                reusable = len(conversation)
            if self.changes and number == self.num_turns // 2:
                conversation[8] = self.draw.randrange(VOCAB_SIZE)
                reusable = 8
            added = [
                self.draw.randrange(VOCAB_SIZE)
                for _ in range(int(self.draw.lognormvariate(6.2, 0.8)))
            ]
            prompt = conversation + added
            num_output = 1 + int(self.draw.lognormvariate(4.4, 0.7))
            self.history.append(prompt)
            yield Turn(prompt, reusable, num_output)
            conversation = prompt + [7] * num_output
            # The answer's last token is never computed.
            reusable = len(conversation) - 1


class SimulatedReplica:
    """A scheduler that runs in simulated time."""

    def __init__(self, fleet: Fleet, rank: int, folder: Path, pool_tokens: int) -> None:
        self.fleet = fleet
        self.link = ReplicaLink(rank)
        self.link.ready, self.link.num_rows = True, ROWS
        self.link.prefixes.max_tokens = pool_tokens
        self.runner = TimedRunner()
        self.is_busy = False
        self.started: list[tuple[int, int]] = []
        self.counts: dict[int, int] = {}
        self.ended: list[int] = []
        self.scheduler = Scheduler(
            self.runner,
            CacheManager(pool_tokens // PAGE_SIZE, PAGE_SIZE, enable_prefix_cache=True),
            SchedulerStats(SharedState(folder / f"state-{rank}", create=True), 10**9),
            SchedulerOptions(
                max_running_requests=ROWS,
                max_queued_requests=None,
                context_len=pool_tokens,
                token_budget=TokenBudget(CHUNK, CHUNK),
                policy="fcfs",
                eos_token_ids=[0],
                overlap=False,
            ),
            send_tokens=self._collect,
            send_front=lambda _: None,
        )
        self.link.connect(lambda message: self.scheduler.receive([message]))

    def _collect(self, message: TokenDeltas) -> None:
        for start, cached in zip(message.starts, message.cached_tokens, strict=True):
            self.started.append((start.request_id, cached))
        self.ended += [end.request_id for end in message.ends]

    def turn(self, now: float) -> float | None:
        """Compute a step that begins at `now`.

        Return when it ends, or `None` if there is no work.
        """
        self.started, self.ended = [], []
        self.scheduler.step()
        if not (self.scheduler.has_work or self.ended or self.started):
            return None
        return now + self.runner.step_s


class Fleet:
    """All replicas, the router in front of them, and the simulated clock."""

    def __init__(self, options: argparse.Namespace, method: str, folder: Path) -> None:
        self.replicas = [
            SimulatedReplica(self, rank, folder, options.pool_tokens)
            for rank in range(options.replicas)
        ]
        self.router = Router([each.link for each in self.replicas], method)
        self.events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self.prompt_tokens = self.cached_tokens = self.reusable_tokens = 0
        self.first_token_s: list[float] = []
        self.waiting: dict[int, tuple[SimulatedReplica, float, Turn, Any]] = {}
        self._ids = itertools.count(1)
        self.num_requests = [0] * options.replicas
        self.end_s = 0.0

    def at(self, when: float, what: Any) -> None:
        """Call `what(when)` at the simulated time `when`."""
        heapq.heappush(self.events, (when, next(self._order), what))

    def run(self) -> None:
        """Run all events in order until none are left."""
        while self.events:
            self.end_s, _, what = heapq.heappop(self.events)
            what(self.end_s)

    def send(self, now: float, turn: Turn, then: Any) -> None:
        """Send a request; `then(when)` is called when its answer is complete."""
        ids = np.array(turn.prompt, dtype=np.int32).tobytes()
        link = self.router.choose(ids, "")
        replica = self.replicas[link.rank]
        link.num_in_flight += 1
        self.num_requests[link.rank] += 1
        request_id = next(self._ids)
        self.waiting[request_id] = (replica, now, turn, then)
        sampling = SamplingParams(max_new_tokens=turn.num_output, seed=1, ignore_eos=True)
        spec = RequestSpec(row=RowSpec(sampling=sampling))
        link.send(GenerateRequest(request_id=request_id, input_ids=ids, spec=spec, arrival=now))
        if not replica.is_busy:
            replica.is_busy = True
            self.at(now, lambda when: self._step(replica, when))

    def _step(self, replica: SimulatedReplica, now: float) -> None:
        end = replica.turn(now)
        if end is None:
            replica.is_busy = False
            return
        started, ended = replica.started, replica.ended
        self.at(end, lambda when: self._deliver(replica, started, ended, when))

    def _deliver(
        self,
        replica: SimulatedReplica,
        started: list[tuple[int, int]],
        ended: list[int],
        now: float,
    ) -> None:
        for request_id, cached in started:
            _, sent, turn, _ = self.waiting[request_id]
            self.first_token_s.append(now - sent)
            self.prompt_tokens += len(turn.prompt)
            self.cached_tokens += cached
            self.reusable_tokens += turn.reusable
        for request_id in ended:
            _, _, _, then = self.waiting.pop(request_id)
            replica.link.num_in_flight -= 1
            then(now)
        self._step(replica, now)


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all sessions with one method of routing."""
    draw = random.Random(0)
    kinds = [
        [draw.randrange(VOCAB_SIZE) for _ in range(options.system_len)]
        for _ in range(options.kinds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(options, method, Path(folder))
        for number in range(options.sessions):
            own = random.Random(number)
            session = Session(own, kinds[number % len(kinds)], options.turns, number % 16 == 0)
            _talk(fleet, session, own.uniform(0, options.ramp))
        fleet.run()
    order = sorted(fleet.first_token_s)
    return {
        "method": method,
        "requests": len(order),
        "cached": fleet.cached_tokens / fleet.prompt_tokens,
        "of_reusable": fleet.cached_tokens / fleet.reusable_tokens,
        "first_token_ms": {
            "p50": 1000 * order[len(order) // 2],
            "p99": 1000 * order[len(order) * 99 // 100],
        },
        "busiest_share": max(fleet.num_requests) * options.replicas / len(order),
        "simulated_s": fleet.end_s,
    }


def _talk(fleet: Fleet, session: Session, start: float) -> None:
    turns = session.turns()

    def go_on(now: float) -> None:
        turn = next(turns, None)
        if turn is not None:
            # A tool runs for a few seconds before the next turn.
            pause = session.draw.expovariate(1 / 3)
            fleet.at(now, lambda when: fleet.send(when, turn, lambda end: go_on(end + pause)))

    fleet.at(start, go_on)


def main() -> None:
    """Print a row for each way of routing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--kinds", type=int, default=8, help="different system texts")
    parser.add_argument("--system-len", type=int, default=4000)
    parser.add_argument("--pool-tokens", type=int, default=400_000, help="KV pool of a replica")
    parser.add_argument("--ramp", type=float, default=60, help="seconds in which sessions begin")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for method in options.methods:
        found = measure(method, options)
        results.append(found)
        first = found["first_token_ms"]
        cached, reused = found["cached"], found["of_reusable"]
        print(
            f"{method}: {found['requests']} requests; {cached:.1%} of prompt tokens cached", end=""
        )
        print(f", {reused:.1%} of the reusable; first token p50 {first['p50']:.0f} ms", end="")
        print(f", p99 {first['p99']:.0f} ms; busiest {found['busiest_share']:.2f} of the mean")
    if options.json:
        write_json(options.json, {"environment": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
