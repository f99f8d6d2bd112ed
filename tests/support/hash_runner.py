"""A runner whose "KV cache" has the tokens themselves.

The next token is a hash of the sequence as read back through the pages. So a wrong page, a lost
page or a stale prefix changes the next token.
"""

import zlib
from collections import deque
from collections.abc import Callable

import numpy as np

from runtime.step.step_plan import HostCopies, HostRun, MaskSource, StepPlan, StepResult


def next_token(sequence: np.ndarray, vocab_size: int = 1000) -> int:
    """Return the hash of a sequence as the next token. It is never 0, which ends sequences."""
    return (
        zlib.crc32(np.ascontiguousarray(sequence, dtype=np.int32).tobytes()) % (vocab_size - 1) + 1
    )


class _Pending:
    def __init__(self, result: StepResult, error: BaseException | None = None) -> None:
        self.result = result
        self.error = error

    def wait(self) -> StepResult:
        if self.error is not None:
            raise self.error
        return self.result


class LateCopies:
    """Copies that were launched but may not be made yet.

    They are made before a step that waits for them, at the latest moment.
    """

    def __init__(self, copy: Callable[[HostRun], None]) -> None:
        self._copy = copy
        # With their ticket.
        self._late: list[tuple[int, HostRun]] = []
        self.last_done = 0

    def make(self, count: int) -> None:
        """Make the earliest copies, one run after the other."""
        for ticket, run in self._late[:count]:
            self._copy(run)
            self.last_done = ticket
        del self._late[:count]
        # A ticket is done when its last run is.
        if self._late:
            self.last_done = min(self.last_done, self._late[0][0] - 1)

    def take(self, copies: HostCopies, *, is_late: bool) -> None:
        """Launch the copies of a plan."""
        first, beside = copies.split()
        self.make(sum(ticket <= copies.needed for ticket, _ in self._late))
        self._late[:0] = [(copies.ticket, run) for run in first]
        self._late += [(copies.ticket, run) for run in beside]
        self.make(len(first) if is_late else len(self._late))


class HashRunner:
    """A runner for the scheduler that computes tokens without a model; implements `Runner`."""

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_len: int) -> None:
        self.page_size = page_size
        self.slots = np.full((num_pages + 1) * page_size, -1, dtype=np.int32)
        self.page_table = np.zeros((max_rows, max_len // page_size + 2), dtype=np.int64)
        self.last_token = np.zeros(max_rows, dtype=np.int32)
        self.num_steps = 0
        self.eos_at: dict[int, int] = {}
        self.fail_rows_with_token: int | None = None
        # For each slot of recurrent states, the tokens that the states have seen.
        self.states: dict[int, list[int]] = {0: []}
        self.host_states: dict[int, list[int]] = {}
        # The window page of each page, and the tokens in window pages; used if there is a window.
        self.window = 0
        self.window_of = np.zeros(num_pages + 1, dtype=np.int64)
        self.window_slots = self.slots.copy()
        # Tokens in host pages, and copies that were launched.
        self.host = np.full_like(self.slots, -1)
        self.is_late = False
        self.page_copies = LateCopies(self._copy_pages)
        self.state_copies = LateCopies(self._copy_states)
        # Errors that the next launch, or the wait for the next step, raises.
        self.launch_error: BaseException | None = None
        self.wait_error: BaseException | None = None

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> _Pending:
        if self.launch_error is not None:
            raise self.launch_error
        self.num_steps += 1
        self._apply(plan)
        tokens: list[int] = []
        failed: dict[int, str] = {}
        offset = 0
        for index, row in enumerate(plan.rows.tolist()):
            start, length = int(plan.start_lens[index]), int(plan.query_lens[index])
            if index < plan.num_decodes:
                new = self.last_token[row : row + 1]
            else:
                new = plan.chunk_tokens[offset : offset + length]
                offset += length
            if self.fail_rows_with_token is not None and self.fail_rows_with_token in new:
                failed[row] = "planted failure"
            places = np.arange(start, start + length)
            pages = self.page_table[row, places // self.page_size]
            assert (pages > 0).all(), "a token was written to a page the row does not have"
            self.slots[pages * self.page_size + places % self.page_size] = new
            if self.window:
                self._write_window(row, places, new)
            if plan.states is not None:
                self._move_states(plan, index, self._sequence(row, start + length))
            if plan.samples[index]:
                token = self.sampled(self._sequence(row, start + length))
                self.last_token[row] = token
                tokens.append(token)
        assert offset == len(plan.chunk_tokens)
        return _Pending(StepResult(np.array(tokens, dtype=np.int32), failed), self.wait_error)

    def make_copies(self, count: int) -> None:
        """Make the earliest late copies of pages and those of states, run after run."""
        for copies in (self.page_copies, self.state_copies):
            copies.make(count)

    def _copy_pages(self, run: HostRun) -> None:
        slots = (run.pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        host = (run.host_pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        assert len(np.unique(host if run.to_host else slots)) == len(slots), "written twice"
        if run.to_host:
            self.host[host] = self.slots[slots]
        else:
            self.slots[slots] = self.host[host]

    def _copy_states(self, run: HostRun) -> None:
        source, target = self.states, self.host_states
        from_, to = run.pages.tolist(), run.host_pages.tolist()
        if not run.to_host:
            source, target, from_, to = target, source, to, from_
        target.update(zip(to, [source[each] for each in from_], strict=True))

    def _apply(self, plan: StepPlan) -> None:
        """Write the changes of block tables."""
        for each, copies in (
            (plan.host, self.page_copies),
            (plan.host_states, self.state_copies),
        ):
            if each is not None:
                copies.take(each, is_late=self.is_late)
        for join in plan.joins:
            self.page_table[join.row] = 0
        for update in plan.page_updates:
            self.page_table[update.row, update.start : update.start + len(update.pages)] = (
                update.pages
            )
        if plan.new_pages is not None:
            for row, length, page in zip(plan.rows, plan.start_lens, plan.new_pages, strict=False):
                if page:
                    self.page_table[row, length // self.page_size] = page
        if plan.windows is not None:
            self.window_of[plan.windows.pages] = plan.windows.window_pages

    def _sequence(self, row: int, length: int) -> np.ndarray:
        everything = np.arange(length)
        pages = self.page_table[row, everything // self.page_size]
        return self.slots[pages * self.page_size + everything % self.page_size]

    def _write_window(self, row: int, places: np.ndarray, new: np.ndarray) -> None:
        """Write tokens to window pages, and check all tokens that their windows contain."""
        seen = np.arange(max(0, places[0] - self.window + 1), places[-1] + 1)
        pages = self.window_of[self.page_table[row, seen // self.page_size]]
        assert (pages > 0).all(), "a page of a window is missing"
        slots = pages * self.page_size + seen % self.page_size
        self.window_slots[slots[len(seen) - len(new) :]] = new
        expected = self._sequence(row, int(places[-1]) + 1)[seen]
        assert np.array_equal(self.window_slots[slots], expected), "a window has other tokens"

    def _move_states(self, plan: StepPlan, index: int, sequence: np.ndarray) -> None:
        """Check the recurrent states that a sequence reads, and write those that it saves."""
        moves = plan.states
        assert moves is not None
        assert len(np.unique(moves.save_slots)) == len(moves.save_slots), "written twice"
        assert not np.isin(moves.save_slots, [0, *moves.reads]).any(), "read and written"
        start, length = int(plan.start_lens[index]), int(plan.query_lens[index])
        seen = self.states[int(moves.reads[index])]
        assert seen == sequence[:start].tolist(), "the state of another prefix"
        own = moves.only(index)
        assert own.save_lens[-1] == length, "the last state is not written"
        for num_tokens, slot in zip(own.save_lens, own.save_slots, strict=True):
            self.states[int(slot)] = sequence[: start + num_tokens].tolist()

    def sampled(self, sequence: np.ndarray) -> int:
        """Return the token after `sequence`, which was read back through its pages."""
        if len(sequence) == self.eos_at.get(int(sequence[0])):
            return 0
        return next_token(sequence)


class StagedHashRunner:
    """A model in stages: a step is computed when it is waited for, and others may be in flight.

    Attributes:
        most_in_flight: most steps that were in flight at once.
    """

    def __init__(self, runner: HashRunner, num_stages: int) -> None:
        self.runner = runner
        self.num_stages = num_stages
        self.most_in_flight = 0
        self.steps: deque[_StagedStep] = deque()

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> "_StagedStep":
        waiting = {row for step in self.steps for row in step.plan.sample_rows.tolist()}
        decodes = set(plan.rows[: plan.num_decodes].tolist())
        assert not decodes & waiting, "the first stage does not know the tokens of these rows"
        if masks is not None:
            masks.make()
        step = _StagedStep(self, plan)
        self.steps.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.steps))
        assert len(self.steps) <= self.num_stages
        return step


class _StagedStep:
    def __init__(self, runner: StagedHashRunner, plan: StepPlan) -> None:
        self.runner = runner
        self.plan = plan

    def wait(self) -> StepResult:
        assert self.runner.steps.popleft() is self, "steps are waited for in their order"
        return self.runner.runner.launch(self.plan).wait()
