"""Log-probabilities in the words of the native API: triples `[logprob, token_id, text]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runtime.client.front_extras import ExtraAnswer
from runtime.client.generation_stream import GenerationChunk
from runtime.extras.logprobs.positions import (
    NAME,
    LogprobSpec,
    PositionLogprobs,
    inputs_of,
    outputs_of,
)

TokenText = Callable[[int], str]
Triple = list[Any]


class LogprobAnswer(ExtraAnswer):
    """One sample's lists for `meta_info`, growing with its chunks."""

    def __init__(self, spec: LogprobSpec, input_ids: list[int], token_text: TokenText) -> None:
        """Start empty.

        Args:
            spec: what was asked for.
            input_ids: the prompt.
            token_text: gives the text of the triples.
        """
        self._spec = spec
        self._token_text = token_text if spec.with_text else None
        self._inputs = _Lists(spec, self._triple)
        self._outputs = _Lists(spec, self._triple)
        self._prompt = input_ids[spec.start_len :] if spec.start_len >= 0 else []
        self._began = False

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Take in a chunk; `incremental` forgets the output that was shown before."""
        if incremental:
            self._outputs.clear()
        prompt = self._prompt
        if not self._began and prompt:
            self._began = True
            # Nothing was computed before the first position that is reported.
            self._inputs.add_unknown(prompt[0])
        known = len(self._inputs.chosen)
        self._inputs.extend(prompt[known:], inputs_of(chunk))
        token_ids = [*chunk.token_ids, *chunk.unsent_ids(NAME)]
        self._outputs.extend(token_ids, outputs_of(chunk))

    def meta_info(self) -> dict[str, Any]:
        """The keys that go into `meta_info`, in lists of their own."""
        meta: dict[str, Any] = {
            "input_token_logprobs": [*self._inputs.chosen],
            "output_token_logprobs": [*self._outputs.chosen],
            "output_token_logprobs_length": len(self._outputs.chosen),
        }
        if self._spec.top_num:
            meta["input_top_logprobs"] = [*self._inputs.top]
            meta["output_top_logprobs"] = [*self._outputs.top]
        if self._spec.token_ids:
            meta["input_token_ids_logprobs"] = [*self._inputs.asked]
            meta["output_token_ids_logprobs"] = [*self._outputs.asked]
        return meta

    def _triple(self, value: float | None, token_id: int) -> Triple:
        text = None if self._token_text is None else self._token_text(token_id)
        return [value, token_id, text]


class _Lists:
    """Chosen, most probable and asked-for entries of the prompt, or of the output."""

    def __init__(self, spec: LogprobSpec, triple: Callable[[float | None, int], Triple]) -> None:
        self._spec = spec
        self._triple = triple
        self.clear()

    def clear(self) -> None:
        self.chosen: list[Triple] = []
        self.top: list[list[Triple] | None] = []
        self.asked: list[list[Triple] | None] = []

    def add_unknown(self, token_id: int) -> None:
        self.chosen.append(self._triple(None, token_id))
        self.top.append(None)
        self.asked.append(None)

    def extend(self, token_ids: list[int], positions: Sequence[PositionLogprobs]) -> None:
        triple, spec = self._triple, self._spec
        for token_id, position in zip(token_ids, positions, strict=False):
            self.chosen.append(triple(position.logprob, token_id))
            if spec.top_num:
                self.top.append([triple(value, each) for value, each in position.top])
            if spec.token_ids:
                pairs = zip(position.id_values, spec.token_ids, strict=True)
                self.asked.append([triple(value, each) for value, each in pairs])
