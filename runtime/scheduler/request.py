"""One request as the scheduler sees it; used by the scheduler only."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.cache.manager import BlockTable
from runtime.cache.radix_tree import Tokens
from runtime.grammar.grammar_backend import Matcher
from runtime.ipc.messages import FinishReason, GenerateRequest, StreamStart
from runtime.requests.image_input import ImageInput
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.image_cache import cache_keys
from runtime.scheduler.step_clock import StepClock, TimeRecord
from runtime.scheduler.thinking_state import Thinking

# Number of prompt tokens that the detokenizer gets as left context of the first output token.
PROMPT_TAIL_TOKENS = 8


@dataclass
class GrammarState:
    """The state of an output's grammar and thoughts; a retraction does not change it.

    Attributes:
        thinking: state of the thoughts before the answer; `None` if they are not tracked.
        compiled: the answer's grammar, perhaps still loading; `None` for a free answer.
        matcher: set when the grammar is loaded.
        spent_s: processor time spent on the grammar while it was measured.
    """

    thinking: Thinking | None = None
    compiled: Future[Any] | None = None
    matcher: Matcher | None = None
    spent_s: float = 0.0

    @property
    def thinks(self) -> bool:
        """Whether thoughts may still come."""
        return self.thinking is not None and not self.thinking.is_over

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        if self.thinking is None or self.thinking.is_over:
            return self.matcher is not None
        return bool(self.thinking.next_ids)

    @property
    def is_done(self) -> bool:
        """Whether the rest of the output is unconstrained and not tracked."""
        return not self.thinks and self.matcher is None


@dataclass
class PromptReport:
    """Positions of a prompt, except the last, about which an extra must report.

    The last position is reported with the first output token.

    Attributes:
        extra: the extra's name.
        reported: the first position that is not reported yet.
        planned: the first position that is neither reported nor in flight.
        end: the prompt's last position.
    """

    extra: str
    reported: int
    end: int
    planned: int = 0

    @property
    def is_open(self) -> bool:
        """Whether some positions are still to be reported."""
        return self.reported < self.end

    def plan(self, start: int, length: int) -> tuple[int, int]:
        """Return which positions `[begin, end)` of a chunk to report, and mark them as planned.

        `begin == end` means that no position of the chunk is reported.
        """
        begin, end = max(start, self.planned), min(start + length, self.end)
        if begin >= end:
            return begin, begin
        self.planned = end
        return begin, end


class Request:
    """A prompt, its output and its state.

    Attributes:
        tokens: prompt and output so far while the request waits; while it runs, its row of
            `RequestTable.tokens` holds them.
        row: the request's row in the running batch, -1 while it waits.
        num_computed: tokens whose keys and values are written or in flight.
        admitted_at: when the request was first admitted, `time.monotonic()`; 0 before that.
        is_resumed: whether an earlier process accepted it.
        sent_ids: int32 bytes, the output tokens that the earlier process sent; extras have reported
            about these tokens.
        num_shown: characters of text that were sent with those tokens.
        cached_tokens: prompt tokens found in the prefix cache at first admission, -1 before it.
        started: whether its `StreamStart` was added for the detokenizer.
        row_spec: the data that its row needs, from the service.
        reports: reports that extras still owe about its prompt.
        reports_outputs: whether an extra reports about each output token.
        embeds: float32 bytes, one row instead of each prompt token; empty if the prompt is tokens.
        images: images of the prompt, with their positions, in order.
        grammar: state of the output's grammar and thoughts; `None` for free text.
        adapter_id: id of the request's adapter (LoRA), 0 for none.
        adapter_slot: the adapter's slot on the device while the request runs; else -1.
        times: how the request spends its time at the scheduler.
    """

    __slots__ = (
        "_prompt_keys",
        "adapter_id",
        "adapter_slot",
        "admitted_at",
        "arrival",
        "block_table",
        "cached_tokens",
        "embeds",
        "grammar",
        "images",
        "is_resumed",
        "max_new_tokens",
        "namespace",
        "num_computed",
        "num_prompt",
        "num_retractions",
        "num_shown",
        "priority",
        "reports",
        "reports_outputs",
        "request_id",
        "row",
        "row_spec",
        "sampling",
        "sent_ids",
        "started",
        "stream",
        "times",
        "tokens",
    )

    def __init__(self, message: GenerateRequest) -> None:
        """Take a checked message over."""
        self.request_id = message.request_id
        self.times = TimeRecord(message.request_id, message.arrival)
        self.tokens: Tokens = np.frombuffer(message.input_ids, dtype=np.int32)
        self.num_prompt = len(self.tokens)
        self.is_resumed = message.is_resumed
        self.sent_ids = message.output_ids
        self.num_shown = message.num_shown
        spec = message.spec
        self.row_spec = spec.row
        self.adapter_id = spec.row.adapter_id
        self.adapter_slot = -1
        self.sampling: SamplingParams = spec.sampling
        assert spec.sampling.max_new_tokens is not None, "the client fills it in"
        self.max_new_tokens: int = spec.sampling.max_new_tokens
        self.stream = spec.stream
        self.namespace = spec.cache_namespace
        if self.adapter_id:
            # Keys and values depend on the adapter. No other one ever gets this id.
            self.namespace = f"lora {self.adapter_id}:{self.namespace}"
        self.priority = spec.priority
        self.arrival = message.arrival
        self.block_table = BlockTable()
        self.row = -1
        self.num_computed = 0
        self.admitted_at = 0.0
        self.cached_tokens = -1
        self.num_retractions = 0
        self.started = False
        self.reports = [
            PromptReport(extra.name, extra.prompt_start, self.num_prompt - 1)
            for extra in spec.extras
            # The prompt's reports were sent with the first token at the latest.
            if extra.prompt_start >= 0 and not message.output_ids
        ]
        self.reports_outputs = any(extra.of_outputs for extra in spec.extras)
        self.embeds = spec.input_embeds
        self.images: list[ImageInput] = spec.images
        self._prompt_keys = cache_keys(self.tokens, self.images)
        if message.output_ids:
            output = np.frombuffer(message.output_ids, dtype=np.int32)
            self.tokens = np.concatenate([self.tokens, output])
        self.grammar: GrammarState | None = None
        if self.sampling.thinking is not None:
            thinking = Thinking(self.sampling.thinking, has_grammar=bool(message.grammar_key))
            self.grammar = GrammarState(thinking)

    def __str__(self) -> str:
        return str(self.request_id)

    def keys(self, tokens: Tokens) -> Tokens:
        """Return the keys of the sequence's first tokens in the prefix cache.

        Args:
            tokens: the first tokens of the sequence.
        """
        if not self.images:
            return tokens
        known = self._prompt_keys[: len(tokens)]
        return np.concatenate([known, tokens[len(known) :]])

    @property
    def first_unreported(self) -> int | None:
        """Return the first position that must be computed because an extra reports about it."""
        return min((each.reported for each in self.reports if each.is_open), default=None)

    @property
    def end_len(self) -> int:
        """Number of tokens after which no more tokens are sampled.

        A request that generates nothing still samples one token if an extra reports about it.
        """
        return self.num_prompt + max(self.max_new_tokens, int(self.reports_outputs))

    def replaces(self, extra: str) -> bool:
        """Whether each report of an extra replaces its earlier ones."""
        return any(each.name == extra and each.replaces for each in self.row_spec.extras)

    def start_message(self, stream_interval: int) -> StreamStart:
        """Return the detokenizer's message; `stream_interval` is the server's default."""
        sampling = self.sampling
        return StreamStart(
            request_id=self.request_id,
            stream=self.stream,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            stream_interval=sampling.stream_interval or stream_interval,
            prompt_tail=b"" if self.embeds else self._prompt_tail(),
            stop_regex=sampling.stop_regex,
            admitted_at=self.admitted_at,
            min_new_tokens=sampling.min_new_tokens,
            thoughts=sampling.thought_texts,
            output_ids=self.sent_ids,
            num_shown=self.num_shown,
        )

    def _prompt_tail(self) -> bytes:
        return self.tokens[: self.num_prompt][-PROMPT_TAIL_TOKENS:].tobytes()

    def length_reason(self) -> FinishReason:
        """Return the reason for a request that reached its token limit."""
        return FinishReason("length", length=self.max_new_tokens)


class LiveRequests(dict[int, Request]):
    """Every request at the scheduler, by id. Removing one, in whatever state, notes its end."""

    def __init__(self, clock: StepClock) -> None:
        """Start empty; `clock` gets the times of requests that end."""
        super().__init__()
        self._clock = clock

    def __delitem__(self, request_id: int) -> None:
        request = self[request_id]
        super().__delitem__(request_id)
        request.times.ended(self._clock, request.num_retractions)

    def discard(self, request_id: int) -> None:
        """Remove a request if it is there."""
        if request_id in self:
            del self[request_id]
