"""Applies the tokens that a step sampled: appends them, ends requests, fills the messages."""

from __future__ import annotations

import numpy as np

from runtime.ipc.messages import (
    FinishReason,
    StreamEnd,
    StreamStart,
    TokenDeltas,
    internal_error,
)
from runtime.requests.extra_spec import ExtraBlock
from runtime.requests.fault_domain import FaultDomains
from runtime.scheduler.grammars import Grammars, Jump
from runtime.scheduler.planner import PlannedStep, Planner
from runtime.scheduler.request import Request
from runtime.scheduler.table import RequestTable
from runtime.scheduler.waiting import WaitingQueue
from runtime.step.step_plan import BoolArray, Int32Array, Int64Array, Reported, StepResult


class OutputBuffer:
    """Collects the output of one step, to be sent to the detokenizer as one message."""

    def __init__(self, stream_interval: int) -> None:
        """Start empty; `stream_interval` applies to requests that do not set their own.

        It is the number of tokens between two events of a stream.
        """
        self._stream_interval = stream_interval
        self._clear()

    def _clear(self) -> None:
        self._starts: list[StreamStart] = []
        self._cached: list[int] = []
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[bytes] = []
        self._ends: list[StreamEnd] = []
        self._extras: list[ExtraBlock] = []

    def start(self, request: Request) -> None:
        """Add the `StreamStart` of a request, unless it was sent before.

        A request needs it before its first token and before its end.
        """
        if not request.started:
            message, cached = (
                request.start_message(self._stream_interval),
                max(request.cached_tokens, 0),
            )
            # Nothing between these two lines may raise: both lists must have the same length.
            self._starts.append(message)
            self._cached.append(cached)
            request.started = True

    def tokens(self, request_ids: list[int], token_ids: bytes) -> None:
        """Add one new token for each of `request_ids`.

        `token_ids` has int32 bytes, `[len(request_ids)]`.
        """
        self._ids += request_ids
        self._counts += [1] * len(request_ids)
        self._tokens.append(token_ids)

    def several(self, request_id: int, token_ids: list[int]) -> None:
        """Add several new tokens of one request."""
        self._ids.append(request_id)
        self._counts.append(len(token_ids))
        self._tokens.append(np.array(token_ids, dtype=np.int32).tobytes())

    def report(
        self, request: Request, found: Reported, *, is_input: bool, unsent_ids: bytes = b""
    ) -> None:
        """Add the report of an extra output, such as log-probabilities, on some positions.

        Args:
            request: the request whose positions are reported.
            found: the report.
            is_input: whether the positions are in the prompt; else they are output positions.
            unsent_ids: int32 bytes, the tokens of these positions, if the output does not include
                them because the request generates nothing.
        """
        self.start(request)
        replaces = request.replaces(found.extra)
        block = ExtraBlock(
            request.request_id, found.extra, is_input, found.data, replaces, unsent_ids
        )
        self._extras.append(block)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Add the end of a request."""
        self.start(request)
        self._ends.append(StreamEnd(request.request_id, reason, request.num_retractions))

    def fail(self, request: Request, reason: FinishReason) -> bool:
        """Add the end of a failed request, unless its end was added already.

        A request without a `StreamStart` is unknown to the detokenizer, so no end is added for it.

        Returns:
            Whether the request's `StreamStart` was added.
        """
        if request.started and all(end.request_id != request.request_id for end in self._ends):
            self._ends.append(StreamEnd(request.request_id, reason))
        return request.started

    def take(self) -> TokenDeltas | None:
        """Return the collected output as one message; `None` if there is none."""
        if not (self._ids or self._ends or self._starts or self._extras):
            return None
        message = TokenDeltas(
            starts=self._starts,
            cached_tokens=self._cached,
            request_ids=self._ids,
            token_counts=self._counts,
            token_ids=b"".join(self._tokens),
            ends=self._ends,
            extras=self._extras,
        )
        self._clear()
        return message


class OutputProcessor:
    """Applies a step's result to the running batch, and ends the requests that are complete."""

    def __init__(  # noqa: PLR0913  # the scheduler's parts
        self,
        table: RequestTable,
        planner: Planner,
        waiting: WaitingQueue,
        buffer: OutputBuffer,
        requests: dict[int, Request],
        eos_token_ids: list[int],
        grammars: Grammars,
        faults: FaultDomains[Request],
        *,
        jump_ahead: bool = False,
    ) -> None:
        """Store the parts of the scheduler.

        `requests` has every live request by id; requests that end are removed from it. With
        `jump_ahead`, if a grammar allows only one next token, the token is appended without being
        sampled.
        """
        self._table = table
        self._planner = planner
        self._buffer = buffer
        self._requests = requests
        self._waiting = waiting
        self._grammars = grammars
        self._faults = faults
        self._jump_ahead = jump_ahead
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._eos_ids = frozenset(eos_token_ids)
        self.num_generated = 0
        self.num_nan = 0

    def process(self, step: PlannedStep, result: StepResult) -> None:
        """Append the tokens that a step sampled, and end the requests that are complete."""
        for row, reason in (step.masks.ends if step.masks is not None else {}).items():
            if (request := self._owner(step, row)) is not None:
                with self._faults.of(request):
                    self.finish(request, reason)
        # Requests may have ended since the launch: their rows do not count.
        self.num_nan += sum(self._owner(step, row) is not None for row in result.nan_rows)
        for row, message in result.failed.items():
            if (request := self._owner(step, row)) is not None:
                self._fail(request, message)
        if step.span_owners:
            self._report_inputs(step, result)
        if result.outputs:
            # This comes before any request ends: an extra output also covers the next token of a
            # request that generates none.
            self._report_outputs(step, result)
        self._share_prompts(step)
        rows = step.plan.sample_rows
        if not len(rows):
            return
        token_ids = result.token_ids
        current = self._table.request_ids[rows] == step.request_ids
        if not current.all():
            self._append_to_retracted(step.request_ids[~current], token_ids[~current])
            rows, token_ids = rows[current], token_ids[current]
        self._append(rows, token_ids)

    def _share_prompts(self, step: PlannedStep) -> None:
        for request, num_tokens in step.chunks_done:
            if request.row >= 0 and request.request_id in self._requests:
                with self._faults.of(request):
                    self._planner.share(request, num_tokens)
        for request in step.prompts_done:
            if request.row >= 0 and request.request_id in self._requests:
                with self._faults.of(request):
                    self._buffer.start(request)
                    self._planner.share(request)
                    if request.max_new_tokens == 0:
                        self.finish(request, request.length_reason())

    def _report_inputs(self, step: PlannedStep, result: StepResult) -> None:
        plan = step.plan
        for span, (request, report) in zip(plan.report_spans, step.span_owners, strict=True):
            found = result.inputs.get((int(plan.rows[span.index]), span.extra))
            if found is not None and request.request_id in self._requests:
                with self._faults.of(request):
                    self._buffer.report(request, found, is_input=True)
                    report.reported += found.num_positions

    def _report_outputs(self, step: PlannedStep, result: StepResult) -> None:
        rows = step.plan.sample_rows
        # Only rows with extra outputs are visited.
        for index in np.flatnonzero(np.isin(rows, list(result.outputs))).tolist():
            row = int(rows[index])
            request = self._requests.get(int(step.request_ids[index]))
            # The request either still has this row, or was put back into the queue. In both cases
            # `process` appends the token.
            if request is None or request.row not in (row, -1):
                continue
            unsent_ids = b"" if request.max_new_tokens else result.token_ids[index].tobytes()
            with self._faults.of(request):
                for found in result.outputs[row]:
                    self._buffer.report(request, found, is_input=False, unsent_ids=unsent_ids)

    def _append(self, rows: Int64Array, token_ids: Int32Array) -> None:
        table = self._table
        lengths = table.num_tokens[rows]
        table.tokens[rows, lengths] = token_ids
        table.num_tokens[rows] = lengths + 1
        self.num_generated += len(rows)
        at_eos = (token_ids[:, None] == self._eos).any(axis=1) & table.ends_at_eos[rows]
        at_end = lengths + 1 >= table.end_len[rows]
        looked_at = at_eos | at_end | table.has_stop_ids[rows]
        # The ids are read now, because ending a request frees its row.
        ids = table.request_ids[rows]
        reasons: dict[int, FinishReason] = {}
        for index in np.flatnonzero(looked_at).tolist():
            request = table.request(int(rows[index]))
            try:
                reason = self._reason(request, int(token_ids[index]), int(lengths[index]) + 1)
            except Exception as error:
                self._faults.failed(request, error)
                continue
            if reason is not None:
                reasons[index] = reason
        constrained = table.has_grammar[rows]
        if constrained.any():
            constrained[list(reasons)] = False
            jumped = self._follow(rows, token_ids, np.flatnonzero(constrained), reasons)
            ids, token_ids = ids[~jumped], token_ids[~jumped]
        self._buffer.tokens(ids.tolist(), token_ids.tobytes())
        for index, reason in reasons.items():
            request = table.request(int(rows[index]))
            with self._faults.of(request):
                self.finish(request, reason)

    def _follow(
        self,
        rows: Int64Array,
        token_ids: Int32Array,
        indices: Int64Array,
        reasons: dict[int, FinishReason],
    ) -> BoolArray:
        """Advance the grammars of constrained rows by their new tokens.

        Args:
            rows: rows that got a token in this step.
            token_ids: the token of each row.
            indices: indices in `rows` of the rows whose grammar is advanced.
            reasons: for each row that ends, its index in `rows` and the reason. This function adds
                the rows that their grammar ends.

        Returns:
            `[num_rows]` bool: rows to which further tokens were appended, because the grammar
            leaves no alternative. The tokens of these rows are already in the output buffer.
        """
        following = rows[indices]
        ends = self._grammars.accept(self._table, following, token_ids[indices])
        reasons.update({int(indices[index]): reason for index, reason in ends.items()})
        jumped = np.zeros(len(rows), dtype=bool)
        if not self._jump_ahead:
            return jumped
        may_jump = self._table.may_jump[following]
        may_jump[list(ends)] = False
        for jump in self._grammars.jump(self._table, following[may_jump]):
            index = int(np.flatnonzero(rows == jump.request.row)[0])
            with self._faults.of(jump.request):
                reason = self._append_jump(jump, int(token_ids[index]))
                jumped[index] = True
                if reason is None:
                    self._planner.catch_up(jump.request)
                else:
                    reasons[index] = reason
        return jumped

    def _append_jump(self, jump: Jump, sampled: int) -> FinishReason | None:
        """Append the tokens that a grammar forces after the token `sampled`.

        Returns:
            The reason why the request ends with them; `None` if it continues.
        """
        table, request = self._table, jump.request
        reported, reason = [sampled], None
        for token_id in jump.token_ids:
            length = int(table.num_tokens[request.row])
            table.tokens[request.row, length] = token_id
            table.num_tokens[request.row] = length + 1
            reported.append(token_id)
            reason = self._reason(request, token_id, length + 1)
            if reason is not None:
                break
        self.num_generated += len(reported) - 1
        self._buffer.several(request.request_id, reported)
        return reason or jump.end

    def _reason(self, request: Request, token_id: int, num_tokens: int) -> FinishReason | None:
        sampling = request.sampling
        if not sampling.ignore_eos and (
            token_id in self._eos_ids or token_id in sampling.stop_token_ids
        ):
            return FinishReason("stop", matched=token_id)
        if num_tokens >= request.num_prompt + request.max_new_tokens:
            return request.length_reason()
        return None

    def _append_to_retracted(self, request_ids: Int64Array, token_ids: Int32Array) -> None:
        # This happens only with overlap: the request was put back into the queue while the step
        # that sampled its token was in flight.
        for request_id, token_id in zip(request_ids.tolist(), token_ids.tolist(), strict=True):
            request = self._requests.get(request_id)
            if request is not None and request.row < 0:
                with self._faults.of(request):
                    self._append_waiting(request, token_id)

    def _append_waiting(self, request: Request, token_id: int) -> None:
        request.tokens = np.append(request.tokens, np.int32(token_id))
        self.num_generated += 1
        self._buffer.start(request)
        self._buffer.tokens([request.request_id], np.int32(token_id).tobytes())
        reason = self._reason(request, token_id, len(request.tokens))
        if reason is not None:
            self._buffer.end(request, reason)
            self._waiting.remove(request)
            del self._requests[request.request_id]

    def _owner(self, step: PlannedStep, row: int) -> Request | None:
        """Return the request for which a step computed a row; `None` if it has left the row."""
        request = self._table.requests[row]
        planned = step.request_ids[step.plan.sample_rows == row]
        if request is None or (planned != request.request_id).any():
            return None
        return request

    def _fail(self, request: Request, message: str) -> None:
        with self._faults.of(request):
            # The request's keys and values may be wrong, so they are not kept in the prefix cache.
            self.finish(request, internal_error(message), keep_cached=False)

    def finish(self, request: Request, reason: FinishReason, *, keep_cached: bool = True) -> None:
        """End a running request and add its end to the output.

        Without `keep_cached`, its keys and values do not enter the prefix cache.
        """
        self._buffer.end(request, reason)
        self.remove(request, keep_cached=keep_cached)

    def remove(self, request: Request, *, keep_cached: bool = True) -> None:
        """Remove a running request; unlike `finish`, report no end to the front."""
        self._planner.drop(request, keep_cached=keep_cached)
        del self._requests[request.request_id]
