"""Runs a decoder without a scheduler: builds batches, assigns pages, decodes greedily."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.kv_forms import KV_FORMS
from runtime.checkpoint.model_spec import (
    LatentState,
    NoState,
    PagedState,
    RecurrentState,
    SharedState,
)
from runtime.models.attention.backend import ATTENTION_BACKENDS, AttentionBackend, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch, KVCache, StateSteps
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.model import CausalLM
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model

# Slots of recurrent states: two for each of the sequences that one test has at most.
NUM_SLOTS = 66


def load(folder: Path, dtype: str = "float32", overrides: dict[str, Any] | None = None) -> CausalLM:
    """Load the model in `folder` on the CPU; `overrides` replace keys of its `config.json`."""
    context = BuildContext(dtype=parse_dtype(dtype), device=torch.device("cpu"))
    return load_model(folder, read_model_spec(folder, overrides), context, lambda share: None)


@dataclass
class Sequence:
    """The tokens of a sequence; the first `computed` of them are in the KV cache."""

    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    # The slot of its recurrent states, 0 ahead of its first token.
    slot: int = 0


class Driver:
    """A model with a KV cache, for tests that choose the batches themselves."""

    def __init__(
        self,
        model: CausalLM,
        backend: str = "cpu",
        page_size: int = 16,
        num_pages: int = 160,
        kv_form: str = "auto",
    ) -> None:
        self.model = model
        self.attention: AttentionBackend = ATTENTION_BACKENDS.load(backend)(
            "cpu", StepLimits(max_seqs=64, max_tokens=2048)
        )
        self.page_size = page_size
        form = KV_FORMS[kv_form]
        dtype = form.dtype or model.context.dtype
        # Slots that were not written contain NaN, which shows reads beyond the end of a sequence.
        # In every number type of the cache, NaN has all bits set.
        self.kv = []
        ranks = model.context.tp_size
        for state in model.spec.layer_states:
            if isinstance(state, SharedState):
                self.kv.append(self.kv[state.layer_idx])
                continue
            if isinstance(state, NoState):
                self.kv.append(KVCache(torch.empty(0), torch.empty(0)))
                continue
            if isinstance(state, RecurrentState):
                parts = [
                    torch.zeros(
                        (NUM_SLOTS, *part.shape_of_rank(ranks)),
                        dtype=torch.float32 if part.dtype == "float32" else dtype,
                    )
                    for part in state.parts
                ]
                empty = torch.empty(0)
                self.kv.append(KVCache(empty, empty, tuple(parts)))
                continue
            assert isinstance(state, PagedState)
            row_bytes = form.row_elements(state.head_dim) * dtype.itemsize
            heads = state.heads_of_rank(ranks)
            shape = (num_pages, heads, page_size, row_bytes)
            pages = (torch.full(shape, 255, dtype=torch.uint8).view(dtype) for _ in "kv")
            keys = next(pages)
            self.kv.append(KVCache(keys, keys if isinstance(state, LatentState) else next(pages)))
        # Each step writes to the slot after the one that the last step wrote.
        self._last_slot = 0
        self.free = list(range(1, num_pages))
        # The pages are in random order, so that no test depends on consecutive pages.
        random.Random(0).shuffle(self.free)

    def start(self, tokens: SequenceOf[int], shared: Sequence | None = None) -> Sequence:
        """Create a sequence; with `shared`, it uses the full pages of their common prefix."""
        sequence = Sequence(list(tokens))
        if shared is not None:
            common = 0
            for mine, theirs in zip(
                sequence.tokens, shared.tokens[: shared.computed], strict=False
            ):
                if mine != theirs:
                    break
                common += 1
            num_pages = min(common, len(sequence.tokens) - 1) // self.page_size
            sequence.pages = shared.pages[:num_pages]
            sequence.computed = num_pages * self.page_size
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence, which must not be shared. Its tokens are kept."""
        self.free += sequence.pages
        sequence.pages = []
        sequence.computed = sequence.slot = 0

    def step(self, work: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Compute the given number of next tokens for each sequence, in one batch.

        Returns:
            For each entry of `work`, the logits of its new tokens, `[num_new, vocab_size]` float32.
        """
        order = sorted(range(len(work)), key=lambda i: work[i][1] > 1)
        plan = [work[i] for i in order]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        indptr = [0]
        for sequence, count in plan:
            end = sequence.computed + count
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free.pop())
            for position in range(sequence.computed, end):
                page = sequence.pages[position // self.page_size]
                ids.append(sequence.tokens[position])
                positions.append(position)
                slots.append(page * self.page_size + position % self.page_size)
            sequence.computed = end
            indptr.append(len(ids))
        width = max(len(sequence.pages) for sequence, _ in plan)
        table = [seq.pages + [0] * (width - len(seq.pages)) for seq, _ in plan]
        batch = ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            qo_indptr=torch.tensor(indptr, dtype=torch.int32),
            seq_lens=torch.tensor([seq.computed for seq, _ in plan], dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            num_decodes=sum(count == 1 for _, count in plan),
            logits_indices=None,
            kv=self.kv,
            attention=self.attention,
            states=self._move_states([seq for seq, _ in plan], indptr),
        )
        with torch.inference_mode():
            self.attention.plan(batch)
            hidden = self.model.forward(batch)
            logits = self.model.compute_logits(hidden)
        rows = logits.split([count for _, count in plan])
        by_entry = dict(zip(order, rows, strict=True))
        return [by_entry[i] for i in range(len(work))]

    def _move_states(self, sequences: SequenceOf[Sequence], indptr: SequenceOf[int]) -> StateSteps:
        """Return where the sequences of a step read and write recurrent states."""
        reads = torch.tensor([each.slot for each in sequences])
        for each in sequences:
            self._last_slot = self._last_slot % (NUM_SLOTS - 1) + 1
            each.slot = self._last_slot
        seqs = torch.arange(len(sequences))
        return StateSteps(
            reads,
            torch.arange(len(sequences) + 1, dtype=torch.int32),
            torch.tensor(indptr[1:]),
            seqs,
            torch.tensor([each.slot for each in sequences]),
            is_decode=indptr[-1] == len(sequences),
        )

    def prefill(self, sequence: Sequence, chunk: int | None = None) -> Tensor:
        """Compute all remaining tokens, `chunk` per step; return the logits of all of them."""
        parts = []
        while sequence.computed < len(sequence.tokens):
            remaining = len(sequence.tokens) - sequence.computed
            parts += self.step([(sequence, min(chunk or remaining, remaining))])
        return torch.cat(parts)

    def greedy(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Append `num_tokens` greedy tokens to each sequence, with all sequences in one batch."""
        for _ in range(num_tokens):
            work = [(seq, len(seq.tokens) - seq.computed) for seq in sequences]
            for sequence, logits in zip(sequences, self.step(work), strict=True):
                sequence.tokens.append(int(logits[-1].argmax()))

    def greedy_in_growing_batches(
        self, prompts: SequenceOf[SequenceOf[int]], num_tokens: int
    ) -> list[Sequence]:
        """Decode greedily; another prompt joins the batch after every `num_tokens` steps."""
        sequences: list[Sequence] = []
        for prompt in prompts:
            sequences.append(self.start(prompt))
            self.greedy(sequences, num_tokens)
        return sequences
