"""A decoder that gives a vector or scores for each text, without a KV cache or a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.checkpoint.model_spec import LatentState, LayerState, PagedState
from runtime.models.attention.backend import AttentionBackend, AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch, KVCache
from runtime.models.attention.packed import attend_packed
from runtime.models.decoder.model import Decoder
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.text_head import TextHead
from runtime.models.model import TextEncoder

_PAGE_SIZE = 16


class DecoderTextEncoder(TextEncoder):
    """The decoder's layers, with a head that makes a vector or scores of a text."""

    spec: DecoderSpec

    def __init__(self, spec: DecoderSpec, context: BuildContext) -> None:
        self.spec, self.context = spec, context
        self.model = Decoder(spec, context)
        self.head = TextHead(spec.pooling, context)
        self.sees_backward_only = spec.is_causal
        self._pages = _Pages([spec.attention(i).state for i in range(spec.num_layers)], context)

    def forward(self, batch: EncoderBatch) -> Tensor:
        return self.model.forward(self._forward_batch(batch, None))

    @property
    def shared_grain(self) -> int:
        return _PAGE_SIZE if self.sees_backward_only and self._reads_last_tokens() else 0

    def compute(self, batch: EncoderBatch) -> Tensor:
        if not self._reads_last_tokens():
            return super().compute(batch)
        hidden = self.model.forward(self._forward_batch(batch, batch.indptr[1:] - 1))
        return self.head.finish(hidden.float())

    def _reads_last_tokens(self) -> bool:
        """Whether the head reads only the last token of each text, so other tokens can skip work.

        If the chosen experts are recorded, every token must be computed.
        """
        counts = self.context.expert_counts
        return self.spec.pooling.mode == "last" and not (counts is not None and counts.is_on)

    def _forward_batch(self, batch: EncoderBatch, wanted: Tensor | None) -> ForwardBatch:
        if batch.attention is None:
            return _whole_texts(batch, BothWays(batch), [], wanted)
        kv, table, firsts = self._pages.hold(batch)
        made = _whole_texts(batch, batch.attention, kv, wanted)
        made.page_table = table
        made.slots = batch.positions + firsts
        if batch.shared is not None:
            made.seq_lens = made.seq_lens + made.seq_lens.new_tensor(batch.shared.lengths)
            # The keys of shared beginnings are in pages only, so no text counts as a whole prompt.
            made.whole_prompts = ()
        batch.attention.plan(made)
        return made

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield from self.model.holders("model")
        yield from self.head.holders()


class BothWays:
    """Attention from each token to all tokens of its text, in place of an `AttentionBackend`."""

    def __init__(self, batch: EncoderBatch) -> None:
        self._lengths = batch.lengths

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Rotate one layer's heads and attend; see `attend_packed`."""
        return attend_packed(layer, qkv, batch.positions, self._lengths)


class _Pages:
    """Pages for one layer's keys and values in a step.

    The next layer whose heads have the same shape overwrites them.
    """

    def __init__(self, states: Sequence[LayerState], context: BuildContext) -> None:
        paged = [state for state in states if isinstance(state, PagedState)]
        assert len(paged) == len(states), "a layer without keys of its own"
        # Keys of `_caches`: whether pages hold latents, and the shape of a page.
        self._forms = [
            (
                isinstance(state, LatentState),
                (state.heads_of_rank(context.tp_size), _PAGE_SIZE, state.head_dim),
            )
            for state in paged
        ]
        self._dtype, self._device = context.dtype, context.device
        self._caches: dict[tuple[bool, tuple[int, int, int]], KVCache] = {}

    def hold(self, batch: EncoderBatch) -> tuple[list[KVCache], Tensor, Tensor]:
        """Return the layers' pages, the block table, and the first slot of each token's text.

        If a text shares its beginning with another text, its first pages are the other text's
        pages; pages for its own tokens follow. The shared keys exist before they are read, because
        a layer writes all keys before it attends.
        """
        lengths = torch.tensor(list(batch.lengths))
        counts = -(-lengths // _PAGE_SIZE)
        # Page 0 is unused.
        firsts = 1 + counts.cumsum(0) - counts
        num_pages = 1 + int(counts.sum())
        for form in set(self._forms):
            if form not in self._caches or len(self._caches[form].k) < num_pages:
                is_latent, shape = form
                k, v = (
                    torch.empty(num_pages, *shape, dtype=self._dtype, device=self._device)
                    for _ in range(2)
                )
                # Values are the first elements of a latent.
                self._caches[form] = KVCache(k, k if is_latent else v)
        table = firsts[:, None] + torch.arange(int(counts.max()))
        if batch.shared is not None:
            lent = torch.from_numpy(batch.shared.lengths) // _PAGE_SIZE
            lenders = firsts[torch.from_numpy(batch.shared.lenders)]
            columns = torch.arange(int((counts + lent).max()))
            is_lent = columns < lent[:, None]
            firsts = firsts - lent
            table = torch.where(is_lent, lenders[:, None], firsts[:, None]) + columns
        slots = (firsts * _PAGE_SIZE).repeat_interleave(lengths)
        # Columns after a text's own pages are not read, but must name existing pages.
        table = table.clamp_(max=num_pages - 1).to(self._device, torch.int32)
        return [self._caches[form] for form in self._forms], table, slots.to(self._device)


def _whole_texts(
    batch: EncoderBatch,
    attention: AttentionBackend | BothWays,
    kv: list[KVCache],
    wanted: Tensor | None,
) -> ForwardBatch:
    indptr = batch.indptr.to(torch.int32)
    nowhere = batch.positions.new_empty(0)
    return ForwardBatch(
        input_ids=batch.input_ids,
        positions=batch.positions,
        slots=nowhere,
        qo_indptr=indptr,
        seq_lens=indptr[1:] - indptr[:-1],
        page_table=nowhere,
        num_decodes=0,
        logits_indices=wanted,
        kv=kv,
        attention=attention,  # type: ignore[arg-type]  # `run` is all that layers call
        whole_prompts=batch.lengths,
    )
