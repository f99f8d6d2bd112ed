"""Simulates agent sessions over many replicas, with our router, scheduler and cache.

    python -m benchmarks.fleet [--sessions FILE] [--replicas 64] [--num-sessions 512] [--json FILE]

All code except the model is the product's: each replica is a `Scheduler` with its `CacheManager`,
and `Router` chooses among them. A step's duration is computed from its plan with figures that were
measured on an H200 with the 8B shape in bfloat16 (`benchmarks/results/h200/README.md`): 42,500
prompt tokens per second, and 4.1 ms for a decode step, plus 25 microseconds for each further row.
All times in the report are simulated.

A session is that of an agent. Without `--sessions` it is drawn. It begins with a system text, which
all sessions of one kind share. Each turn sends the whole conversation with the previous answer and
a tool's result. A tool runs between turns. One turn in eight returns to an earlier turn (a branch).
One session in sixteen changes a line of its system text half-way; nothing after this line can then
be reused.

With `--sessions`, the sessions are those of a trace (`benchmarks.session_trace`), for example
`benchmarks/agents.jsonl.gz`. Each turn is requested as long after the previous answer as in the
trace. The trace is repeated until there are enough sessions. A block of tokens that several
sessions of the trace have is shared text, such as a system prompt. `--kinds` is the number of
versions of each shared text, of which the repetitions use one after the other. All other blocks
are different in each repetition. So two sessions share what two sessions of the trace share, if
their repetitions use the same version.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.session_trace import BLOCK, TracedRequest, block_tokens, read_trace
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
ANY_TOKEN = 7

IntArray = NDArray[np.int32]
_NO_ANSWER = (np.empty(0, dtype=np.int32), 0)


class _Pending:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class TimedRunner:
    """A runner that returns given tokens and computes a step's duration.

    Attributes:
        step_s: duration of the last step.
        answers: the tokens of answers, by the seed of the request; other tokens are `ANY_TOKEN`.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self.answers: dict[int, IntArray] = {}
        # The answer of each row, and the position of its first token.
        self._rows: dict[int, tuple[IntArray, int]] = {}

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> _Pending:
        del masks
        num_prompt = plan.num_tokens - plan.num_decodes
        self.step_s = max(
            num_prompt / PROMPT_TOKENS_PER_S, DECODE_STEP_S if plan.num_decodes else 0.0
        )
        self.step_s += plan.num_decodes * ROW_S
        for join in plan.joins:
            self._rows.pop(join.row, None)
            if (answer := self.answers.get(join.spec.sampling.seed or 0)) is not None:
                self._rows[join.row] = answer, join.num_prompt
        lengths = (plan.start_lens + plan.query_lens)[plan.samples].tolist()
        tokens = np.full(len(lengths), ANY_TOKEN, dtype=np.int32)
        for index, (row, length) in enumerate(zip(plan.sample_rows.tolist(), lengths, strict=True)):
            answer, num_prompt = self._rows.get(row, _NO_ANSWER)
            if length - num_prompt < len(answer):
                tokens[index] = answer[length - num_prompt]
        return _Pending(StepResult(tokens))


@dataclass
class Turn:
    """One request of a session.

    Attributes:
        prompt: token ids.
        reusable: number of tokens at its beginning that an earlier request of the fleet also had.
        num_output: tokens to generate.
        pause_s: seconds between the answer and the next turn.
        answer: the first tokens to generate; those after them are `ANY_TOKEN`.
    """

    prompt: IntArray
    reusable: int
    num_output: int
    pause_s: float
    answer: IntArray | None = None


@dataclass
class Session:
    """An agent's conversation, drawn from a seed, which yields one turn at a time."""

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
            # A tool runs for a few seconds before the next turn.
            pause_s = self.draw.expovariate(1 / 3)
            yield Turn(np.array(prompt, dtype=np.int32), reusable, num_output, pause_s)
            conversation = prompt + [ANY_TOKEN] * num_output
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
        ids = turn.prompt.tobytes()
        link = self.router.choose(ids, "")
        replica = self.replicas[link.rank]
        link.num_in_flight += 1
        self.num_requests[link.rank] += 1
        request_id = next(self._ids)
        self.waiting[request_id] = (replica, now, turn, then)
        if turn.answer is not None:
            replica.runner.answers[request_id] = turn.answer
        sampling = SamplingParams(max_new_tokens=turn.num_output, seed=request_id, ignore_eos=True)
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
            replica.runner.answers.pop(request_id, None)
            then(now)
        self._step(replica, now)


class TracedSessions:
    """The sessions of a trace, repeated as the module says."""

    def __init__(self, sessions: list[list[TracedRequest]], num_versions: int, block: int) -> None:
        """Find what the sessions share.

        Args:
            sessions: the requests of each session.
            num_versions: number of versions of each shared text.
            block: number of tokens of a block of the trace.
        """
        self._sessions = sessions
        self._num_versions = num_versions
        self._block = block
        num_with: Counter[int] = Counter()
        for session in sessions:
            num_with.update({each for turn in session for each in _all_ids(turn)})
        self._num_ids = max(num_with) + 1
        self._is_shared = np.zeros(self._num_ids, dtype=bool)
        self._is_shared[[each for each, count in num_with.items() if count > 1]] = True
        # Numbers of all blocks that the fleet has had.
        self._seen: set[int] = set()

    def start_s(self, number: int, ramp_s: float) -> float:
        """Return when session `number` begins: the repetitions begin within `ramp_s`."""
        copy, index = divmod(number, len(self._sessions))
        shift_s = random.Random(copy).uniform(0, ramp_s) if copy else 0.0
        return shift_s + self._sessions[index][0].timestamp / 1000

    def turns(self, number: int) -> Iterator[Turn]:
        """Yield each turn of session `number`; numbers above those of the trace repeat it."""
        copy, index = divmod(number, len(self._sessions))
        session = self._sessions[index]
        for request, following in zip(session, [*session[1:], None], strict=True):
            ids = self._numbered(request.hash_ids, copy)
            answer_ids = self._numbered(request.answer_hash_ids, copy)
            length, block = request.input_length, self._block
            whole = length // block
            prompt = block_tokens(ids, block, VOCAB_SIZE)[:length]
            answered = block_tokens(answer_ids, block, VOCAB_SIZE)
            # The answer's first block begins with the tokens of the prompt's partial block.
            partial = min(length - whole * block, len(answered))
            prompt[whole * block : whole * block + partial] = answered[:partial]
            num_seen = next((n for n in range(whole) if ids[n] not in self._seen), whole)
            # The last token of a prompt is always computed.
            reusable = min(num_seen * block, length - 1)
            self._seen.update(ids[:whole])
            pause_s = following.delay / 1000 if following else 0.0
            yield Turn(prompt, reusable, request.output_length, pause_s, answered[partial:])
            # The answer's last token is never computed.
            self._seen.update(answer_ids[: (length + request.output_length - 1) // block - whole])

    def _numbered(self, ids: list[int], copy: int) -> list[int]:
        """Return the numbers of blocks in one repetition."""
        numbers = np.array(ids, dtype=np.int64)
        version = np.where(
            self._is_shared[numbers], copy % self._num_versions, self._num_versions + copy
        )
        found: list[int] = (numbers + self._num_ids * version).tolist()
        return found


def _all_ids(request: TracedRequest) -> list[int]:
    return request.hash_ids + request.answer_hash_ids


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all sessions with one method of routing."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(options, method, Path(folder))
        for start_s, turns in _sessions(options):
            _talk(fleet, turns, start_s)
        fleet.run()
    order = sorted(fleet.first_token_s)
    return {
        "method": method,
        "requests": len(order),
        "prompt_tokens": fleet.prompt_tokens,
        "cached": fleet.cached_tokens / fleet.prompt_tokens,
        "of_reusable": fleet.cached_tokens / fleet.reusable_tokens,
        "first_token_ms": {
            "p50": 1000 * order[len(order) // 2],
            "p99": 1000 * order[len(order) * 99 // 100],
        },
        "busiest_share": max(fleet.num_requests) * options.replicas / len(order),
        "simulated_s": fleet.end_s,
    }


def _sessions(options: argparse.Namespace) -> Iterator[tuple[float, Iterator[Turn]]]:
    """Yield when each session begins, and its turns."""
    if options.sessions is not None:
        trace = read_trace(options.sessions)
        traced = TracedSessions(trace, options.kinds, options.block_size)
        for number in range(options.num_sessions):
            yield traced.start_s(number, options.ramp), traced.turns(number)
        return
    draw = random.Random(0)
    kinds = [
        [draw.randrange(VOCAB_SIZE) for _ in range(options.system_len)]
        for _ in range(options.kinds)
    ]
    for number in range(options.num_sessions):
        own = random.Random(number)
        session = Session(own, kinds[number % len(kinds)], options.turns, number % 16 == 0)
        yield own.uniform(0, options.ramp), session.turns()


def _talk(fleet: Fleet, turns: Iterator[Turn], start_s: float) -> None:
    def go_on(now: float) -> None:
        turn = next(turns, None)
        if turn is not None:
            pause_s = turn.pause_s
            fleet.at(now, lambda when: fleet.send(when, turn, lambda end: go_on(end + pause_s)))

    fleet.at(start_s, go_on)


def main() -> None:
    """Print a row for each way of routing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--sessions", type=Path, help="a trace; without it, sessions are drawn")
    parser.add_argument("--block-size", type=int, default=BLOCK, help="tokens of a trace's block")
    parser.add_argument("--num-sessions", type=int, default=512)
    parser.add_argument("--turns", type=int, default=24, help="of a drawn session")
    parser.add_argument("--kinds", type=int, default=8, help="different system texts, or versions")
    parser.add_argument("--system-len", type=int, default=4000, help="of a drawn session")
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
