"""Records how each request spends its time in the scheduler.

The clock adds the duration of each step to running sums. A request stores the sums at its start;
the difference at its end is the request's share. So a step costs a few additions, regardless of the
number of requests in it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from runtime.ipc.time_messages import ChunkTime, Neighbor, PrefixBreak, Wait, WorkerTimes

# Number of a request's prompt chunks that are reported one by one.
MAX_CHUNKS = 16
# Number of slow steps that are kept; if there are more, the oldest half is removed.
_MAX_SLOW = 1024


class _Sums(NamedTuple):
    plain_steps: int
    plain_s: float
    mixed_steps: int
    mixed_s: float


class _Slow(NamedTuple):
    ended_at: float
    neighbor: Neighbor


class StepNote(NamedTuple):
    """The facts about a step that are known when it is planned.

    Attributes:
        planned_at: when the step was planned, `time.monotonic()`.
        num_prompt: number of prompt tokens that the step computes.
        largest: id of the request with the longest prompt chunk; -1 if the step has none.
    """

    planned_at: float
    num_prompt: int = 0
    largest: int = -1


class StepClock:
    """Sums over all steps of one scheduler, and the time records of requests that have ended.

    Attributes:
        tower_s: seconds spent in steps that computed images.
        stepped_at: when the last step ended, `time.monotonic()`.
        last_prompts: the last step, if it computed prompts; else `None`.
    """

    def __init__(self) -> None:
        """Start with all sums at zero."""
        self._plain_steps = self._mixed_steps = 0
        self._plain_s = self._mixed_s = self.tower_s = 0.0
        self.stepped_at = 0.0
        self.last_prompts: Neighbor | None = None
        self._newest = StepNote(0.0)
        # For each cause in `Wait`, how many seconds the first request of the queue has waited for
        # it, up to `_waited_until`.
        self._waits = [0.0] * len(Wait)
        self._wait = Wait.STEP
        self._waited_until = time.monotonic()
        # The steps with prompts that are slower than all later ones, in order. So the first of them
        # after any moment is the slowest since that moment.
        self._slow: list[_Slow] = []
        self._ended: list[WorkerTimes] = []

    def waits(self) -> list[float]:
        """Return how long the first requests of the queue have waited, for each cause in `Wait`.

        The times are seconds, summed over all first requests since the start of the scheduler.
        """
        now = time.monotonic()
        self._waits[self._wait] += now - self._waited_until
        self._waited_until = now
        return self._waits.copy()

    def wait_for(self, wait: Wait) -> None:
        """Set what the queue's first request waits for from now on; the queue may be empty."""
        now = time.monotonic()
        self._waits[self._wait] += now - self._waited_until
        self._waited_until = now
        self._wait = wait

    def usual_step_s(self) -> float:
        """Return the mean duration of the steps that only decoded, in seconds."""
        return self._plain_s / max(self._plain_steps, 1)

    def sums(self) -> _Sums:
        """Return the number and the seconds of all steps so far, with and without prompts."""
        return _Sums(self._plain_steps, self._plain_s, self._mixed_steps, self._mixed_s)

    def planned(self, parts: Sequence[tuple[TimeRecord, int, int]], wait: Wait) -> StepNote:
        """Record that a step was planned, and what the first waiting request waits for from now on.

        Args:
            parts: for each prompt chunk of the step, the time record of its request, the chunk's
                first position and its length.
            wait: what the queue's first request waits for. `Wait.STEP` counts as `Wait.PROMPTS` if
                the step computes prompts.

        Returns:
            The note to pass to `stepped` when the step has ended.
        """
        if not parts:
            self.wait_for(wait)
            self._newest = StepNote(self._waited_until)
            return self._newest
        self.wait_for(Wait.PROMPTS if wait is Wait.STEP else wait)
        for record, start, num_tokens in parts:
            record.chunk(start, num_tokens, self._waited_until)
        largest, _, _ = max(parts, key=lambda part: part[2])
        num_prompt = sum(part[2] for part in parts)
        self._newest = StepNote(self._waited_until, num_prompt, largest.told.request_id)
        return self._newest

    def stepped(self, note: StepNote, *, has_images: bool) -> None:
        """Record that a step has ended.

        Args:
            note: the result of `planned` for this step.
            has_images: whether the step computed images.
        """
        now = time.monotonic()
        # With overlap the previous step may have ended after this one was planned.
        step_s = now - max(note.planned_at, self.stepped_at)
        self.stepped_at = now
        if note is self._newest and self._wait is Wait.PROMPTS:
            # No other step is in flight, so the queue no longer waits for prompts.
            self.wait_for(Wait.STEP)
        if has_images:
            self.tower_s += step_s
        if note.largest < 0:
            self._plain_steps += 1
            self._plain_s += step_s
            self.last_prompts = None
            return
        self._mixed_steps += 1
        self._mixed_s += step_s
        slow = self._slow
        while slow and slow[-1].neighbor.step_s <= step_s:
            slow.pop()
        self.last_prompts = Neighbor(step_s, note.num_prompt, note.largest)
        slow.append(_Slow(now, self.last_prompts))
        if len(slow) > _MAX_SLOW:
            del slow[: _MAX_SLOW // 2]

    def slowest_since(self, since: float, but: int) -> Neighbor | None:
        """Return the slowest step with prompts that ended after `since`, `time.monotonic()`.

        Steps in which request `but` had the longest chunk do not count. `None` if there is none.
        """
        first = bisect_left(self._slow, since, key=lambda each: each.ended_at)
        for each in self._slow[first:]:
            if each.ended_at > since and each.neighbor.request_id != but:
                return each.neighbor
        return None

    def add_ended(self, times: WorkerTimes) -> None:
        """Add the times of a request that has ended, for the next `take_ended`."""
        self._ended.append(times)

    def take_ended(self) -> list[WorkerTimes]:
        """Return the times of the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


class TimeRecord:
    """Records how one request spends its time in the scheduler.

    Attributes:
        told: the times that are sent to the front process when the request has ended.
    """

    __slots__ = (
        *("_arrival", "_clock", "_counted_at", "_decodes_since", "_own", "_retracted_at"),
        *("_sums", "_tower_s", "_waits", "told"),
    )

    def __init__(self, request_id: int, arrival: float) -> None:
        """Start when the scheduler reads the request's message.

        `arrival` is when the request arrived at the front process, `time.monotonic()`.
        """
        self._arrival = arrival
        self.told = WorkerTimes(request_id, time.monotonic())
        self._clock: StepClock | None = None
        self._waits: list[float] = []
        # What this request waits for while later requests may overtake it; `None` if it waits for
        # the same as the queue. And the time up to which its waiting is counted.
        self._own: Wait | None = None
        self._counted_at = 0.0
        self._sums: _Sums | None = None
        self._decodes_since = self._retracted_at = self._tower_s = 0.0

    def queued(self, clock: StepClock) -> None:
        """Record that the request enters the queue, for the first time or after a retraction."""
        now = time.monotonic()
        self._clock = clock
        if not self.told.queued_at:
            self.told.queued_at = now
            if clock.stepped_at > self._arrival:
                self.told.read_after = clock.last_prompts
            self.told.waits = [0.0] * len(Wait)
            self._waits, self._counted_at = clock.waits(), now
        elif not self._retracted_at:
            self._retracted_at = now
            self._close()

    def skipped(self, wait: Wait) -> None:
        """Record that the request waits for `wait`, while later requests may be admitted."""
        if self._own is not wait:
            self._count_waits()
            self._own = wait

    def passed(self) -> None:
        """Record that the request no longer waits for a cause of its own."""
        if self._own is not None:
            self._count_waits()
            self._own = None

    def admitted(self, num_cached: int, prefix: PrefixBreak | None, is_empty: bool) -> None:
        """Record that the request was admitted; only its first admission counts.

        Args:
            num_cached: number of prompt tokens that came from the prefix cache.
            prefix: where the prompt differs from the cached prompts; `None` if all of it is cached.
            is_empty: whether the request's namespace of the cache is empty.
        """
        told, clock = self.told, self._clock
        if told.admitted_at or clock is None:
            return
        self._count_waits()
        told.admitted_at = time.monotonic()
        told.cached_tokens, told.prefix, told.is_cache_empty = num_cached, prefix, is_empty
        self._tower_s = clock.tower_s

    def _count_waits(self) -> None:
        """Add the time since the last call to the waiting times, until the first admission."""
        told, clock = self.told, self._clock
        if clock is None or told.admitted_at:
            return
        before, since = self._waits, self._counted_at
        self._waits, self._counted_at = clock.waits(), time.monotonic()
        if self._own is not None:
            told.waits[self._own] += self._counted_at - since
            return
        for wait, seconds in enumerate(self._waits):
            told.waits[wait] += seconds - before[wait]

    def chunk(self, start: int, num_tokens: int, planned_at: float) -> None:
        """Record a step that computes a chunk of the request's tokens.

        Args:
            start: the chunk's first position.
            num_tokens: the chunk's length.
            planned_at: when the step was planned, `time.monotonic()`.
        """
        told = self.told
        told.num_chunks += 1
        told.num_computed += num_tokens
        if told.num_chunks <= MAX_CHUNKS:
            told.chunks.append(ChunkTime(start, num_tokens, planned_at))

    def prompt_done(self) -> None:
        """Record that all known tokens of the request are computed, so that it decodes now."""
        told, clock = self.told, self._clock
        if clock is None:
            return
        now = time.monotonic()
        if not told.prompt_done_at:
            told.prompt_done_at = now
            told.tower_s = clock.tower_s - self._tower_s
        if self._retracted_at:
            told.retracted_s += now - self._retracted_at
            self._retracted_at = 0.0
        if self._sums is None:
            self._sums = clock.sums()
            self._decodes_since = now

    def _close(self) -> None:
        """Add the steps since `prompt_done` to the request's times."""
        told, clock, before = self.told, self._clock, self._sums
        if clock is None or before is None:
            return
        self._sums, after = None, clock.sums()
        told.plain_steps += after.plain_steps - before.plain_steps
        told.plain_s += after.plain_s - before.plain_s
        told.mixed_steps += after.mixed_steps - before.mixed_steps
        told.mixed_s += after.mixed_s - before.mixed_s
        found = clock.slowest_since(self._decodes_since, but=told.request_id)
        if found is not None and (told.neighbor is None or found.step_s > told.neighbor.step_s):
            told.neighbor = found

    def ended(self, clock: StepClock, num_retractions: int) -> None:
        """Record the end of the request, whatever its state, and pass its times to `clock`."""
        told = self.told
        self._close()
        told.ended_at = time.monotonic()
        if self._retracted_at:
            told.retracted_s += told.ended_at - self._retracted_at
        self._count_waits()
        told.num_retractions = num_retractions
        told.usual_step_s = clock.usual_step_s()
        clock.add_ended(told)
