"""One request as the scheduler sees it; nobody else holds one."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.cache.manager import PageHold
from runtime.cache.radix_tree import Tokens
from runtime.executor.step_plan import Float32Array
from runtime.grammar.backend import Matcher
from runtime.ipc.messages import FinishReason, GenerateRequest, StreamStart
from runtime.requests.sampling_params import SamplingParams

# So many prompt tokens let the detokenizer give the first output token its left context.
PROMPT_TAIL_TOKENS = 8


@dataclass
class GrammarState:
    """How far an output has come in its grammar; a retraction leaves it as it is.

    Attributes:
        compiled: the grammar, once it is loaded.
        after: the grammar holds once this token was generated; `None` from the start.
        matcher: set when the grammar is there.
        is_active: whether the grammar holds already.
        spent_s: processor time spent on following it while it was watched.
    """

    compiled: Future[Any]
    after: int | None = None
    matcher: Matcher | None = None
    is_active: bool = True
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        """Let the grammar hold from the start unless it waits for a token."""
        self.is_active = self.after is None


@dataclass
class PromptReport:
    """Positions of a prompt, all but the last, about which something is to be reported.

    What is found at the last one comes with the first output token.

    Attributes:
        reported: nothing is to be reported about positions before this one any more.
        planned: the same, with those in flight.
        end: the prompt's last position.
    """

    reported: int
    end: int
    planned: int = 0

    @property
    def is_open(self) -> bool:
        """Whether something is still to be computed for it."""
        return self.reported < self.end

    def plan(self, start: int, length: int) -> tuple[int, int]:
        """The positions `[begin, end)` of a chunk that are to be reported; none when equal."""
        begin, end = max(start, self.planned), min(start + length, self.end)
        if begin >= end:
            return begin, begin
        self.planned = end
        return begin, end


class Request:
    """A prompt and what has become of it.

    Attributes:
        tokens: prompt and output so far, while the request waits; while it runs, its row of
            `RequestTable.tokens` is the truth.
        row: its row in the running batch, -1 while it waits.
        num_computed: tokens whose keys and values are written or in flight.
        admitted_at: `time.monotonic()` of its first admission, 0 before it.
        cached_tokens: prompt tokens found in the prefix cache at first admission, -1 before it.
        started: whether the detokenizer has been told of it.
        logprobs: which log-probabilities it wants, if any.
        hidden: which hidden states it wants, if any.
        logprob_report, hidden_report: what is still to be told about its prompt.
        embeds: `[num_prompt, hidden_size]`, in the place of the prompt's tokens.
        grammar: what the output must match; `None` for free text.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "cached_tokens",
        "embeds",
        "grammar",
        "hidden",
        "hidden_report",
        "hold",
        "logprob_report",
        "logprobs",
        "max_new_tokens",
        "namespace",
        "num_computed",
        "num_prompt",
        "num_retractions",
        "priority",
        "request_id",
        "row",
        "sampling",
        "started",
        "stream",
        "tokens",
    )

    def __init__(self, message: GenerateRequest) -> None:
        """Take a checked message over."""
        self.request_id = message.request_id
        self.tokens: Tokens = np.frombuffer(message.input_ids, dtype=np.int32)
        self.num_prompt = len(self.tokens)
        self.sampling: SamplingParams = message.sampling
        assert message.sampling.max_new_tokens is not None, "the client fills it in"
        self.max_new_tokens: int = message.sampling.max_new_tokens
        self.stream = message.stream
        self.namespace = message.cache_namespace
        self.priority = message.priority
        self.arrival = message.arrival
        self.hold = PageHold()
        self.row = -1
        self.num_computed = 0
        self.admitted_at = 0.0
        self.cached_tokens = -1
        self.num_retractions = 0
        self.started = False
        self.logprobs = message.logprobs
        start = -1 if message.logprobs is None else message.logprobs.start_len
        last = self.num_prompt - 1
        self.logprob_report = PromptReport(self.num_prompt if start < 0 else start, last)
        self.hidden = message.hidden_states
        self.hidden_report = PromptReport(0 if self.hidden == "all" else self.num_prompt, last)
        self.embeds: Float32Array | None = None
        if message.input_embeds:
            values = np.frombuffer(message.input_embeds, dtype=np.float32)
            self.embeds = values.reshape(self.num_prompt, -1)
        self.grammar: GrammarState | None = None

    @property
    def reports(self) -> tuple[PromptReport, PromptReport]:
        """Everything that may have to be told about the prompt."""
        return self.logprob_report, self.hidden_report

    @property
    def first_unreported(self) -> int | None:
        """The first position that must be computed because it is to be reported."""
        return min((each.reported for each in self.reports if each.is_open), default=None)

    @property
    def end_len(self) -> int:
        """Tokens after which nothing more is sampled.

        Where none is to be generated one still is, when something is to be told about it.
        """
        least = 1 if self.logprobs is not None or self.hidden else 0
        return self.num_prompt + max(self.max_new_tokens, least)

    def start_message(self, stream_interval: int) -> StreamStart:
        """What the detokenizer needs to know; `stream_interval` is the server's default."""
        sampling = self.sampling
        self.started = True
        return StreamStart(
            request_id=self.request_id,
            stream=self.stream,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            stream_interval=sampling.stream_interval or stream_interval,
            prompt_tail=b"" if self.embeds is not None else self._prompt_tail(),
            stop_regex=sampling.stop_regex,
            admitted_at=self.admitted_at,
        )

    def _prompt_tail(self) -> bytes:
        return self.tokens[: self.num_prompt][-PROMPT_TAIL_TOKENS:].tobytes()

    def length_reason(self) -> FinishReason:
        """The reason when the token limit is reached."""
        return FinishReason("length", length=self.max_new_tokens)
