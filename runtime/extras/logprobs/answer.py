"""Forms log-probabilities in the native API's format: triples `[logprob, token_id, text]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypedDict

from runtime.client.front_extras import AnsweredSample, ExtraAnswer
from runtime.client.generation_stream import GenerationChunk
from runtime.eventloop.json_pieces import BATCH, GrowingJson
from runtime.extras.logprobs.positions import (
    NAME,
    LogprobRows,
    LogprobSpec,
    inputs_of,
    outputs_of,
)

TokenText = Callable[[int], str]
Triple = list[Any]
# The type of a triple in the API's schema. The log-probability is null at the first reported prompt
# position, where none was computed. The text is null unless it was requested.
TripleBody = tuple[float | None, int, str | None]


class LogprobMeta(TypedDict, total=False):
    """The keys of `meta_info` with log-probabilities; each list has an entry for each position."""

    input_token_logprobs: list[TripleBody]
    output_token_logprobs: list[TripleBody]
    output_token_logprobs_length: int
    input_top_logprobs: list[list[TripleBody] | None]
    output_top_logprobs: list[list[TripleBody] | None]
    input_token_ids_logprobs: list[list[TripleBody] | None]
    output_token_ids_logprobs: list[list[TripleBody] | None]


class _Growing(Protocol):
    def extend(self, cost: int, items: Iterable[Any], *, batch: int = 1) -> None: ...
    def shown(self) -> Any: ...


class _PythonList:
    def __init__(self) -> None:
        self._items: list[Any] = []

    def extend(self, cost: int, items: Iterable[Any], *, batch: int = 1) -> None:  # noqa: ARG002
        self._items.extend(items)

    def shown(self) -> list[Any]:
        # The list is copied, because a caller in this process may keep the previous one.
        return [*self._items]


class _JsonList(GrowingJson):
    def shown(self) -> GrowingJson:
        return self


class LogprobAnswer(ExtraAnswer):
    """The log-probabilities of one sample, collected from its chunks of output."""

    def __init__(self, spec: LogprobSpec, sample: AnsweredSample) -> None:
        """Start without values; `spec` says which log-probabilities were requested."""
        self._spec = spec

        def make_list() -> _Growing:
            return _JsonList(keeps=sample.is_shown_again) if sample.as_json else _PythonList()

        token_text = sample.token_text if spec.with_text else None
        self._inputs = _Lists(spec, token_text, make_list)
        self._outputs = _Lists(spec, token_text, make_list)
        self._prompt = sample.prompt_ids[spec.start_len :] if spec.start_len >= 0 else []
        self._began = False

    def add(self, chunk: GenerationChunk, *, incremental: bool) -> None:
        """Add a chunk of output; with `incremental`, earlier output values are removed first."""
        if incremental:
            self._outputs.clear()
        prompt = self._prompt
        if not self._began and prompt:
            self._began = True
            # No log-probability was computed for the first reported prompt token.
            self._inputs.add_unknown(prompt[0])
        if not chunk.extras:
            return
        known, inputs, outputs = self._inputs.num_positions, inputs_of(chunk), outputs_of(chunk)
        if inputs:
            self._inputs.extend(prompt[known : known + len(inputs)], inputs)
        if outputs:
            self._outputs.extend([*chunk.token_ids, *chunk.unsent_ids(NAME)], outputs)

    def meta_info(self) -> dict[str, Any]:
        """Return the keys for `meta_info`."""
        inputs, outputs = self._inputs, self._outputs
        meta: dict[str, Any] = {
            "input_token_logprobs": inputs.chosen.shown(),
            "output_token_logprobs": outputs.chosen.shown(),
            "output_token_logprobs_length": outputs.num_positions,
        }
        if self._spec.top_num:
            meta["input_top_logprobs"] = inputs.top.shown()
            meta["output_top_logprobs"] = outputs.top.shown()
        if self._spec.token_ids:
            meta["input_token_ids_logprobs"] = inputs.asked.shown()
            meta["output_token_ids_logprobs"] = outputs.asked.shown()
        return meta


class _Lists:
    """The lists for the prompt or for the output: actual tokens, most probable, requested ids."""

    def __init__(
        self, spec: LogprobSpec, token_text: TokenText | None, make_list: Callable[[], _Growing]
    ) -> None:
        self._spec = spec
        self._token_text = token_text
        self._make_list = make_list
        self.clear()

    def clear(self) -> None:
        self.num_positions = 0
        self.chosen = self._make_list()
        self.top = self._make_list()
        self.asked = self._make_list()

    def add_unknown(self, token_id: int) -> None:
        self.num_positions += 1
        self.chosen.extend(1, self._triples([None], [token_id]))
        self.top.extend(1, [None])
        self.asked.extend(1, [None])

    def extend(self, token_ids: list[int], rows: LogprobRows) -> None:
        num = min(len(token_ids), len(rows))
        spec, triples = self._spec, self._triples
        self.num_positions += num
        self.chosen.extend(num, triples(rows.chosen, token_ids), batch=BATCH)
        if spec.top_num:
            self.top.extend(
                num * spec.top_num,
                ([*triples(*rows.top_columns(at))] for at in range(num)),
                batch=max(1, BATCH // spec.top_num),
            )
        if spec.token_ids:
            self.asked.extend(
                num * len(spec.token_ids),
                ([*triples(rows.id_values(at), spec.token_ids)] for at in range(num)),
                batch=max(1, BATCH // len(spec.token_ids)),
            )

    def _triples(
        self, values: Iterable[float | None], token_ids: Iterable[int]
    ) -> Iterator[Triple]:
        text = self._token_text
        for value, token_id in zip(values, token_ids, strict=False):
            yield [value, token_id, None if text is None else text(token_id)]
