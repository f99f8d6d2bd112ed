"""A request and its state in the scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.cache.block_table import BlockTable
from runtime.cache.file_tier import Fetch
from runtime.cache.host_tier import ADAPTER
from runtime.cache.manager import CacheManager
from runtime.cache.radix_tree import Tokens
from runtime.grammar.grammar_backend import Matcher
from runtime.ipc.messages import FinishReason, GenerateRequest, StreamStart
from runtime.requests.image_input import ImageInput
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.image_cache import cache_keys
from runtime.scheduler.step_clock import StepClock, TimeRecord
from runtime.scheduler.thinking_state import Thinking

# Number of prompt tokens that are sent to the detokenizer, which needs some text on the left of the
# first output token.
PROMPT_TAIL_TOKENS = 8


@dataclass
class GrammarState:
    """The state of an output's grammar and thoughts; kept when the request is retracted.

    Thoughts are the reasoning that a model writes before its answer.

    Attributes:
        thinking: state of the thoughts; `None` if they are not tracked.
        compiled: the grammar of the answer, perhaps still loading; `None` without a grammar.
        matcher: the grammar's position in the output; `None` until the grammar is loaded.
        spent_s: CPU time that the grammar used while it was measured, seconds.
    """

    thinking: Thinking | None = None
    compiled: Future[Any] | None = None
    matcher: Matcher | None = None
    spent_s: float = 0.0

    @property
    def thinks(self) -> bool:
        """Whether the output may still contain thoughts."""
        return self.thinking is not None and not self.thinking.is_over

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained: by the grammar, or to end the thoughts now."""
        if self.thinking is None or self.thinking.is_over:
            return self.matcher is not None
        return bool(self.thinking.next_ids)

    @property
    def is_done(self) -> bool:
        """Whether the output has no grammar, and its thoughts are over or not tracked."""
        return not self.thinks and self.matcher is None


@dataclass
class PromptReport:
    """The prompt positions whose extra output, such as log-probabilities, was not reported yet.

    The prompt's last position is not among them. Its report comes with the first output token.

    Attributes:
        extra: name of the extra output.
        reported: the first position that is not reported yet.
        planned: the first position that is neither reported nor computed by a step in flight.
        end: the prompt's last position, where the range ends.
    """

    extra: str
    reported: int
    end: int
    planned: int = 0

    @property
    def is_open(self) -> bool:
        """Whether some positions remain to be reported."""
        return self.reported < self.end

    def plan(self, start: int, length: int) -> tuple[int, int]:
        """Return which positions `[begin, end)` of a chunk to report, and mark them as planned.

        Args:
            start: first position of the chunk.
            length: number of positions of the chunk.

        Returns:
            `begin` and `end`; they are equal if no position of the chunk is reported.
        """
        begin, end = max(start, self.planned), min(start + length, self.end)
        if begin >= end:
            return begin, begin
        self.planned = end
        return begin, end


class Request:
    """A prompt, the output so far, and the state of their computation.

    Attributes:
        tokens: token ids of prompt and output while the request waits. While it runs,
            `RequestTable.tokens` has them in the request's row.
        row: index of the request in the running batch; -1 while it waits.
        num_computed: number of tokens whose keys and values were in the prefix cache when the
            request was admitted; 0 while it waits.
        admitted_at: when the request was first admitted, `time.monotonic()`; 0 before that.
        is_resumed: whether an earlier process had accepted the request.
        sent_ids: int32 bytes, the output tokens that the earlier process had sent. The extra
            outputs of these tokens were sent too.
        num_shown: number of characters of text that the earlier process had sent.
        cached_tokens: number of prompt tokens that came from the prefix cache when the request was
            first admitted; -1 before that.
        started: whether the detokenizer's `StreamStart` for this request was added.
        row_spec: the data that the executor needs about the request.
        reports: for each extra output about the prompt, the positions that are still due.
        reports_outputs: whether an extra output is wanted for each output token.
        embeds: float32 bytes, one embedding for each prompt position, which the model reads instead
            of tokens; empty if the prompt consists of tokens.
        images: images of the prompt with their positions, in order.
        grammar: state of the output's grammar and thoughts; `None` if neither is used.
        adapter_id: id of the request's LoRA adapter; 0 for none.
        adapter_slot: the adapter's slot on the device while the request runs; else -1.
        fetch: the pages that are read from files for the request; `None` if there are none.
        has_looked_at_files: whether `fetch` was set. Files are asked once.
        times: record of how the request spends its time in the scheduler.
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
        "fetch",
        "grammar",
        "has_looked_at_files",
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
        """Create a waiting request from a message whose values are checked."""
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
            # Keys and values depend on the adapter, so adapters share no prefixes. An adapter's id
            # is never used for another adapter.
            self.namespace = f"{ADAPTER}{self.adapter_id}:{self.namespace}"
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
            # If there is an earlier output, the prompt's reports were sent with its first token at
            # the latest.
            if extra.prompt_start >= 0 and not message.output_ids
        ]
        self.reports_outputs = any(extra.of_outputs for extra in spec.extras)
        self.embeds = spec.input_embeds
        self.images: list[ImageInput] = spec.images
        self._prompt_keys = cache_keys(self.tokens, self.images)
        if message.output_ids:
            output = np.frombuffer(message.output_ids, dtype=np.int32)
            self.tokens = np.concatenate([self.tokens, output])
        self.fetch: Fetch | None = None
        self.has_looked_at_files = False
        self.grammar: GrammarState | None = None
        if self.sampling.thinking is not None:
            thinking = Thinking(self.sampling.thinking, has_grammar=bool(message.grammar_key))
            self.grammar = GrammarState(thinking)

    def __str__(self) -> str:
        return str(self.request_id)

    def keys(self, tokens: Tokens) -> Tokens:
        """Return the keys by which the prefix cache finds the sequence's first tokens.

        The keys are the tokens, except at positions of images; see `cache_keys`.

        Args:
            tokens: the first tokens of the sequence.
        """
        if not self.images:
            return tokens
        known = self._prompt_keys[: len(tokens)]
        return np.concatenate([known, tokens[len(known) :]])

    def cacheable_keys(self) -> Tokens:
        """Return the keys of the tokens that may come from the prefix cache, and one more.

        Positions with extra outputs must be computed, so the cached prefix ends before them.
        """
        keys, first = self.keys(self.tokens), self.first_unreported
        return keys if first is None else keys[: first + 1]

    def waits_for_files(self, cache: CacheManager) -> bool:
        """Whether the request should wait until pages of its prompt are read from files.

        The first call starts to read them.
        """
        if not self.has_looked_at_files:
            self.has_looked_at_files = True
            self.fetch = cache.tiers.fetch(self.cacheable_keys(), self.namespace)
        return cache.tiers.is_waiting(self.fetch)

    @property
    def first_unreported(self) -> int | None:
        """The first prompt position whose extra output is not reported yet.

        `None` if there is none.

        The model must compute the prompt from this position on, even if it is cached.
        """
        return min((each.reported for each in self.reports if each.is_open), default=None)

    @property
    def end_len(self) -> int:
        """Number of tokens, prompt and output, after which no more tokens are sampled.

        A request that generates nothing still samples one token if an extra output needs it.
        """
        return self.num_prompt + max(self.max_new_tokens, int(self.reports_outputs))

    def replaces(self, extra: str) -> bool:
        """Whether each report of the extra output named `extra` replaces the earlier ones."""
        return any(each.name == extra and each.replaces for each in self.row_spec.extras)

    def start_message(self, stream_interval: int) -> StreamStart:
        """Return the message that announces the request to the detokenizer.

        `stream_interval` is the server's default for the tokens between two events of a stream.
        """
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
        """Return the finish reason of a request that has reached its limit of output tokens."""
        return FinishReason("length", length=self.max_new_tokens)


class LiveRequests(dict[int, Request]):
    """All requests in the scheduler, by id. Removing a request records when it ended."""

    def __init__(self, clock: StepClock) -> None:
        """Start empty; `clock` receives the times of each removed request."""
        super().__init__()
        self._clock = clock

    def __delitem__(self, request_id: int) -> None:
        request = self[request_id]
        super().__delitem__(request_id)
        request.times.ended(self._clock, request.num_retractions)

    def discard(self, request_id: int) -> None:
        """Remove a request if it is present."""
        if request_id in self:
            del self[request_id]
