"""One request as the scheduler sees it; nobody else holds one."""

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
from runtime.scheduler.thinking_state import Thinking

# So many prompt tokens let the detokenizer give the first output token its left context.
PROMPT_TAIL_TOKENS = 8


@dataclass
class GrammarState:
    """What an output follows, and how far it has come; a retraction leaves it as it is.

    Attributes:
        thinking: of thoughts before the answer; `None` where nothing is to be done about them.
        compiled: the grammar of the answer, once it is loaded; `None` for a free one.
        matcher: set when the grammar is there.
        spent_s: processor time spent on following it while it was watched.
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
        """Whether the next token is not any."""
        if self.thinking is None or self.thinking.is_over:
            return self.matcher is not None
        return bool(self.thinking.next_ids)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to follow."""
        return not self.thinks and self.matcher is None


@dataclass
class PromptReport:
    """Positions of a prompt, all but the last, about which an extra is to report something.

    What is found at the last one comes with the first output token.

    Attributes:
        extra: its name.
        reported: nothing is to be reported about positions before this one any more.
        planned: the same, with those in flight.
        end: the prompt's last position.
    """

    extra: str
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
        row_spec: what its row needs to know of it, from the service.
        reports: what is still to be told about its prompt.
        reports_outputs: whether something is to be told of each output token.
        embeds: float32 bytes, one row in the place of each prompt token; empty where tokens are.
        images: of the prompt, each at its place, in order.
        grammar: what the output follows; `None` for free text.
    """

    __slots__ = (
        "_prompt_keys",
        "admitted_at",
        "arrival",
        "cached_tokens",
        "embeds",
        "grammar",
        "hold",
        "images",
        "max_new_tokens",
        "namespace",
        "num_computed",
        "num_prompt",
        "num_retractions",
        "priority",
        "reports",
        "reports_outputs",
        "request_id",
        "row",
        "row_spec",
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
        spec = message.spec
        self.row_spec = spec.row
        self.sampling: SamplingParams = spec.sampling
        assert spec.sampling.max_new_tokens is not None, "the client fills it in"
        self.max_new_tokens: int = spec.sampling.max_new_tokens
        self.stream = spec.stream
        self.namespace = spec.cache_namespace
        self.priority = spec.priority
        self.arrival = message.arrival
        self.hold = BlockTable()
        self.row = -1
        self.num_computed = 0
        self.admitted_at = 0.0
        self.cached_tokens = -1
        self.num_retractions = 0
        self.started = False
        self.reports = [
            PromptReport(extra.name, extra.prompt_start, self.num_prompt - 1)
            for extra in spec.extras
            if extra.prompt_start >= 0
        ]
        self.reports_outputs = any(extra.of_outputs for extra in spec.extras)
        self.embeds = spec.input_embeds
        self.images: list[ImageInput] = spec.images
        self._prompt_keys = cache_keys(self.tokens, self.images)
        self.grammar: GrammarState | None = None
        if self.sampling.thinking is not None:
            thinking = Thinking(self.sampling.thinking, has_grammar=bool(message.grammar_key))
            self.grammar = GrammarState(thinking)

    def __str__(self) -> str:
        return str(self.request_id)

    def keys(self, tokens: Tokens) -> Tokens:
        """What the first tokens of the sequence are known by in the prefix cache.

        Args:
            tokens: as many as are asked about, from the first one on.
        """
        if not self.images:
            return tokens
        known = self._prompt_keys[: len(tokens)]
        return np.concatenate([known, tokens[len(known) :]])

    @property
    def first_unreported(self) -> int | None:
        """The first position that must be computed because it is to be reported."""
        return min((each.reported for each in self.reports if each.is_open), default=None)

    @property
    def end_len(self) -> int:
        """Tokens after which nothing more is sampled.

        Where none is to be generated one still is, when something is to be told about it.
        """
        return self.num_prompt + max(self.max_new_tokens, int(self.reports_outputs))

    def replaces(self, extra: str) -> bool:
        """Whether what an extra reports takes the place of what it has reported."""
        return any(each.name == extra and each.replaces for each in self.row_spec.extras)

    def start_message(self, stream_interval: int) -> StreamStart:
        """What the detokenizer needs to know; `stream_interval` is the server's default."""
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
        )

    def _prompt_tail(self) -> bytes:
        return self.tokens[: self.num_prompt][-PROMPT_TAIL_TOKENS:].tobytes()

    def length_reason(self) -> FinishReason:
        """The reason when the token limit is reached."""
        return FinishReason("length", length=self.max_new_tokens)
