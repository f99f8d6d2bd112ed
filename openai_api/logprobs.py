"""Log-probabilities in OpenAI's words: chat's `content` entries and the lists of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.client.generation_stream import GenerationChunk
from runtime.errors import InvalidRequest
from runtime.extras.logprobs.positions import LogprobSpec, PositionLogprobs, inputs_of, outputs_of
from runtime.text.token_pieces import TokenPieces

MAX_CHAT_TOP = 20
MAX_COMPLETION_TOP = 5


def chat_spec(wanted: bool | None, top: int | None) -> LogprobSpec | None:
    """What `logprobs` and `top_logprobs` of a chat ask for.

    Raises:
        InvalidRequest: `top_logprobs` out of range, or without `logprobs`.
    """
    if top is not None and not 0 <= top <= MAX_CHAT_TOP:
        raise InvalidRequest(
            f"top_logprobs must be in [0, {MAX_CHAT_TOP}], got {top}.", param="top_logprobs"
        )
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobSpec(top_num=top or 0) if wanted else None


def completion_spec(wanted: int | bool | None, echo: bool) -> LogprobSpec | None:
    """What `logprobs` of a completion asks for; with `echo` of the prompt too.

    Raises:
        InvalidRequest: not a number, or out of range.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True or not 0 <= wanted <= MAX_COMPLETION_TOP:
        raise InvalidRequest(
            f"logprobs must be an integer in [0, {MAX_COMPLETION_TOP}], got {wanted}.",
            param="logprobs",
        )
    return LogprobSpec(start_len=0 if echo else -1, top_num=wanted)


def chat_logprobs(chunks: Sequence[GenerationChunk], pieces: TokenPieces) -> dict[str, Any]:
    """`{"content": [...]}` of the chunks' tokens."""
    return {
        "content": [
            {
                **_chat_token(token_id, position.logprob, pieces),
                "top_logprobs": [_chat_token(each, value, pieces) for value, each in position.top],
            }
            for chunk in chunks
            for token_id, position in zip(chunk.token_ids, outputs_of(chunk), strict=False)
        ],
        "refusal": None,
    }


def _chat_token(token_id: int, value: float, pieces: TokenPieces) -> dict[str, Any]:
    data = pieces.data(token_id)
    return {"token": data.decode(errors="replace"), "bytes": [*data], "logprob": value}


@dataclass
class CompletionLogprobs:
    """The lists of one choice's `logprobs`; a stream takes what has come since the last event."""

    pieces: TokenPieces
    spec: LogprobSpec
    prompt: list[int]
    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    _num_prompt_done: int = 0

    def add(self, chunk: GenerationChunk) -> None:
        """Take in a chunk: the echoed prompt first, then its tokens."""
        if self.spec.start_len >= 0 and not self._num_prompt_done:
            self._add(self.prompt[0], None)
            self._num_prompt_done = 1
        done = self._num_prompt_done
        inputs = inputs_of(chunk)
        self._num_prompt_done += len(inputs)
        for token_id, position in zip(self.prompt[done:], inputs, strict=False):
            self._add(token_id, position)
        for token_id, position in zip(chunk.token_ids, outputs_of(chunk), strict=False):
            self._add(token_id, position)

    def _add(self, token_id: int, position: PositionLogprobs | None) -> None:
        text = self.pieces.text
        self.tokens.append(text(token_id))
        self.values.append(None if position is None else position.logprob)
        best: dict[str, float] | None = None
        if position is not None:
            best = {}
            for value, each in position.top:
                # Tokens that read the same share a key: the most probable one has it.
                best.setdefault(text(each), value)
        self.top.append(best)

    def take(self) -> dict[str, Any]:
        """The lists so far; they begin anew."""
        lists = {
            "text_offset": [-1] * len(self.tokens),
            "token_logprobs": self.values,
            "tokens": self.tokens,
            "top_logprobs": self.top if self.spec.top_num else None,
        }
        self.tokens, self.values, self.top = [], [], []
        return lists
