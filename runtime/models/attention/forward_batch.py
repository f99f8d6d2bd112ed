"""The input of one step of the model: plain tensors, without requests or configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.state_places import StatePlaces

if TYPE_CHECKING:
    from runtime.models.attention.backend import AttentionBackend
    from runtime.models.layers.adapter_slots import AdapterSlots


@dataclass
class KVCache:
    """One layer's memory between steps: pages of keys and values, or slots of recurrent states.

    Attributes:
        k, v: `[num_pages, num_kv_heads, page_size, row_elements]`. A row holds `head_dim` numbers
            of the model's dtype, or is stored in a form of `kernels.kv_forms`, which includes
            scales. Page 0 belongs to no sequence; padding may write there. With latents (MLA), `k`
            and `v` are the same tensor. Both are empty for a recurrent layer.
        states: the parts of a recurrent layer's states, `[num_slots + 2, ...]` each. Slot 0 is all
            zeros and never written; padding writes to the last slot.
        is_windowed: whether the layer has a window and its pages are listed in
            `ForwardBatch.window`.
    """

    k: Tensor
    v: Tensor
    states: tuple[Tensor, ...] = ()
    is_windowed: bool = False


class WindowView(NamedTuple):
    """The pages of layers with a window, if these layers have pages of their own.

    Attributes:
        page_table: `[num_seqs, max_pages]` int32, the block table of these layers. Entries for
            pages behind the window may be 0.
        slots: `[num_tokens]` int64, the slot mapping of these layers; see `ForwardBatch.slots`.
    """

    page_table: Tensor
    slots: Tensor


class StateSteps:
    """The slots where a step's sequences read and write recurrent states.

    Attributes:
        reads: `[num_seqs]` int64, for each sequence the slot of its states before its new tokens.
        save_indptr: `[num_seqs + 1]` int32, bounds of each sequence's saves in the `save_` tensors
            below. A save writes the states after one of the step's tokens to a slot.
        save_ends: `[num_saves]` int64, one more than the index, in the step, of the last token that
            is part of the saved states.
        save_seqs: `[num_saves]` int64, index of each save's sequence.
        save_slots: `[num_saves]` int64, slots to which the states are written.
        is_decode: whether each sequence has one new token.
    """

    def __init__(
        self,
        reads: Tensor,
        save_indptr: Tensor,
        save_ends: Tensor,
        save_seqs: Tensor,
        save_slots: Tensor,
        *,
        is_decode: bool,
    ) -> None:
        """Keep the tensors, which the class describes."""
        self.reads = reads
        self.save_indptr = save_indptr
        self.save_ends = save_ends
        self.save_seqs = save_seqs
        self.save_slots = save_slots
        self.is_decode = is_decode
        self._taps: dict[int, Tensor] = {}

    def places(self, qo_indptr: Tensor) -> StatePlaces:
        """Return the sequences' bounds and the slots of their states in the form that kernels take.

        Args:
            qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's tokens.
        """
        saves = self.save_indptr, self.save_ends, self.save_slots
        return StatePlaces(qo_indptr, self.reads, *saves, self.is_decode)

    def taps(self, width: int, qo_indptr: Tensor, num_tokens: int) -> Tensor:
        """Return which rows a causal convolution reads for each token and for each save.

        The convolution reads a tensor of `num_tokens + num_seqs * (width - 1)` rows: one row per
        token of the step, then the last `width - 1` rows before the step, which each sequence's
        state holds. Layers of equal `width` share the result.

        Args:
            width: tokens that the convolution reads, including the newest.
            qo_indptr: `[num_seqs + 1]`, bounds of each sequence's tokens.
            num_tokens: number of the step's tokens.

        Returns:
            `[num_tokens + num_saves, width - 1]` int64 row numbers, in each row the oldest token
            first.
        """
        found = self._taps.get(width)
        if found is None:
            found = self._taps[width] = self._make_taps(width, qo_indptr.long(), num_tokens)
        return found

    def _make_taps(self, width: int, qo_indptr: Tensor, num_tokens: int) -> Tensor:
        device = self.reads.device
        tokens = torch.arange(num_tokens, device=device)
        seqs = torch.searchsorted(qo_indptr, tokens, right=True).sub_(1)
        seqs.clamp_(max=len(self.reads) - 1)
        ends, seqs = torch.cat([tokens, self.save_ends]), torch.cat([seqs, self.save_seqs])
        rows = ends[:, None] - torch.arange(width - 1, 0, -1, device=device)
        # How many rows lie before the sequence's first new token.
        before = rows - qo_indptr[seqs][:, None]
        kept = width - 1
        of_state = num_tokens + seqs[:, None] * kept + kept + before
        return torch.where(before < 0, of_state, rows)


@dataclass(frozen=True)
class HostLengths:
    """Host copies of the batch's tensors of the same names, for back ends that plan on the host.

    Attributes:
        window_table: `ForwardBatch.window.page_table`; `None` if `window` is `None`.
    """

    qo_indptr: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    window_table: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of a step that stand for images, and the vectors of these images.

    Attributes:
        token_indices: `[n]` int64, indices of these tokens in the step.
        vectors: tensors `[n, hidden_size]` of the model's dtype. The first tensor replaces the
            embeddings of these tokens. Each further tensor is added to the residual stream after
            one layer, beginning with the first layer.
    """

    token_indices: Tensor
    vectors: list[Tensor]


@dataclass
class ForwardBatch:
    """The new tokens of all sequences of a step, concatenated; those with one new token come first.

    In a CUDA graph the tensors may be longer than the step. The tokens after `qo_indptr[-1]`, and
    the tokens of rows that fill up a decode batch, are padding. Almost every op of a layer computes
    each row independently, so padding rows may hold any numbers, even NaN. An op that reads across
    rows (the largest value of a tensor for one fp8 scale, the number of tokens for each expert)
    must exclude padding. It can do so by `qo_indptr[-1]`, or by `slots`, which are negative or on
    page 0 for all padding.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, each token's index in its own sequence.
        slots: `[num_tokens]` int64, the slot mapping: `page * page_size + offset` of the place in
            the KV cache where a token's keys and values are written.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's new tokens.
        seq_lens: `[num_seqs]` int32, number of each sequence's keys, including this step's.
        page_table: `[num_seqs, max_pages]` int32, the block table: each sequence's pages in order.
        num_decodes: number of sequences with exactly one new token at the start of the batch;
            `None` if only the device knows it.
        logits_indices: `[num_samples]` int64, indices of the tokens that need logits; the model
            computes its output for these tokens only. `None` means every token.
        kv: one entry per layer.
        attention: the attention back end, planned for this batch.
        embed_indices, embeds: `[n]` int64 and `[n, hidden_size]` float32: indices of tokens whose
            embedding the request gave, and these embeddings.
        key_ends: `[num_tokens]` int32: how many keys, counted from the first of its sequence, the
            token attends to. It is set if some tokens attend to later tokens, as an image's tokens
            do. With `None`, a token attends to the keys up to its own.
        images: the tokens that stand for images; `None` if there are none.
        rope_axes: `[3, num_tokens]` int64, rotary positions of time, row and column, if the three
            differ.
        cos_sin: `[num_tokens, head_dim]` float32, used instead of each layer's own rotary table.
            The model makes it from `rope_axes` and then sets `positions` to its row numbers.
        whole_prompts: the lengths of those prompts at the end of the batch that have no earlier
            tokens, in order. Their keys and values are all in the same tensor as their queries.
        shares_prefixes: whether sequences may share their first keys, in the groups that were sent
            to the back end. It is set only if each sequence has one new token.
        host: host copies of lengths for a back end with `reads_host`; `None` inside graphs.
        adapters: the LoRA adapters of the batch's tokens. When the model drops tokens between
            layers, it drops their entries in `adapters` too.
        states: the slots where recurrent states are read and written; `None` if the model has no
            such states.
        window: the pages of windowed layers; `None` if all layers share pages.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    qo_indptr: Tensor
    seq_lens: Tensor
    page_table: Tensor
    num_decodes: int | None
    logits_indices: Tensor | None
    kv: list[KVCache]
    attention: AttentionBackend
    whole_prompts: Sequence[int] = ()
    shares_prefixes: bool = False
    host: HostLengths | None = None
    embed_indices: Tensor | None = None
    embeds: Tensor | None = None
    key_ends: Tensor | None = None
    images: ImageTokens | None = None
    rope_axes: Tensor | None = None
    cos_sin: Tensor | None = None
    adapters: AdapterSlots | None = None
    states: StateSteps | None = None
    window: WindowView | None = None

    def pages_of(self, layer_idx: int) -> Tensor:
        """Return the page table of a layer."""
        if self.window is not None and self.kv[layer_idx].is_windowed:
            return self.window.page_table
        return self.page_table

    def slots_of(self, layer_idx: int) -> Tensor:
        """Return the slots to which layer `layer_idx` writes keys and values."""
        if self.window is not None and self.kv[layer_idx].is_windowed:
            return self.window.slots
        return self.slots

    def put_embeds(self, embedded: Tensor) -> None:
        """Overwrite rows of `embedded`, `[num_tokens, hidden_size]`, in place.

        The new rows are the embeddings that requests gave, and the vectors of images.
        """
        if self.embed_indices is not None and self.embeds is not None:
            embedded.index_copy_(0, self.embed_indices, self.embeds.to(embedded.dtype))
        if self.images is not None:
            embedded.index_copy_(0, self.images.token_indices, self.images.vectors[0])

    @property
    def deep_vectors(self) -> Sequence[Tensor]:
        """Return the image vectors that the first layers add at `images.token_indices`."""
        return () if self.images is None else self.images.vectors[1:]
