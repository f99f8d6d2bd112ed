"""One step's input to the model: plain tensors, no requests, no configuration, no globals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from runtime.models.attention.backend import AttentionBackend
    from runtime.models.layers.adapter_slots import AdapterSlots


@dataclass
class KVCache:
    """One layer's memory: pages of keys and values, or slots of recurrent states.

    Attributes:
        k, v: `[num_pages, num_kv_heads, page_size, row_elements]`: `head_dim` numbers of the
            model's dtype, or a row of another form (`kernels.kv_forms`), which includes scales. No
            sequence has page 0: padding may write there. For latents `k` and `v` are one tensor.
            Empty for a recurrent layer.
        states: `[num_slots + 2, ...]` each, the parts of a recurrent layer's states. Slot 0 is
            zeros and never written; padding writes to the last slot.
    """

    k: Tensor
    v: Tensor
    states: tuple[Tensor, ...] = ()


class StateSteps:
    """Where a step's sequences read and write recurrent states; on the device.

    Attributes:
        reads: `[num_seqs]` int64, slot of each sequence's states ahead of its new tokens.
        save_indptr: `[num_seqs + 1]` int32, bounds of each sequence's saves.
        save_ends: `[num_saves]` int64, index in the step of the token behind the last one that the
            saved states have seen.
        save_seqs: `[num_saves]` int64, index of each save's sequence.
        save_slots: `[num_saves]` int64, where the states are written.
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
        """Take the tensors."""
        self.reads = reads
        self.save_indptr = save_indptr
        self.save_ends = save_ends
        self.save_seqs = save_seqs
        self.save_slots = save_slots
        self.is_decode = is_decode
        self._taps: dict[int, Tensor] = {}

    def taps(self, width: int, qo_indptr: Tensor, num_tokens: int) -> Tensor:
        """Return where a convolution reads what precedes each token and each save.

        The indices are into the step's `num_tokens` rows, followed by `width - 1` rows of each
        sequence's state. Layers of equal width share the indices.

        Args:
            width: tokens that the convolution sees, including the newest.
            qo_indptr: `[num_seqs + 1]`, bounds of each sequence's tokens.
            num_tokens: number of the step's tokens.

        Returns:
            `[num_tokens + num_saves, width - 1]` int64, the oldest first.
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
    """Host copies of the batch's tensors, for a back end that plans on the host."""

    qo_indptr: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]


@dataclass(frozen=True)
class ImageTokens:
    """Tokens that stand for images.

    Attributes:
        token_indices: `[n]` int64, indices of these tokens in the step.
        vectors: `[n, hidden_size]` each, of the model's dtype. The first one replaces their
            embeddings; each further one is added to the stream after one of the first layers, in
            order.
    """

    token_indices: Tensor
    vectors: list[Tensor]


@dataclass
class ForwardBatch:
    """New tokens of several sequences, flattened; sequences with one new token come first.

    In a graph the tensors may be longer than the step: tokens after `qo_indptr[-1]`, and those of
    rows that pad a decode batch, are padding. Every op of a layer works on each row independently,
    so padding rows may hold anything, even NaN, without an effect on other rows. An op that reads
    across rows (the largest value of a tensor for one fp8 scale, how many tokens an expert gets)
    must exclude them: by `qo_indptr[-1]`, or by `slots`, which is negative or on page 0 for all
    padding.

    Attributes:
        input_ids: `[num_tokens]` int64.
        positions: `[num_tokens]` int64, each token's index in its own sequence.
        slots: `[num_tokens]` int64, where keys and values go: `page * page_size + offset`.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's new tokens.
        seq_lens: `[num_seqs]` int32, keys of each sequence, including this step's.
        page_table: `[num_seqs, max_pages]` int32.
        num_decodes: this many first sequences have exactly one new token; `None` if only the device
            knows.
        logits_indices: `[num_samples]` int64, the tokens that need logits; the model gives its
            output for these only. `None`: every token.
        kv: one entry per layer.
        attention: the attention back end, planned for this batch.
        embed_indices, embeds: `[n]` int64 and `[n, hidden_size]` float32: tokens with a given
            embedding, and these embeddings.
        key_ends: `[num_tokens]` int32, how many of its sequence's keys each token may see, if
            some see later tokens, as the tokens of an image do; `None`: up to itself.
        images: tokens that stand for images, if there are any.
        rope_axes: `[3, num_tokens]` int64, positions of time, row and column, if they differ.
        cos_sin: `[num_tokens, head_dim]` float32, replaces each layer's table; the model makes it
            from `rope_axes`, and `positions` are then its rows.
        whole_prompts: numbers of new tokens of those last sequences that have no earlier tokens, in
            order: their keys and values are also in the tensor of their queries.
        shares_prefixes: whether sequences may share their first keys, in the groups that were sent
            to the back end; only if each has one new token.
        host: host copies of lengths for a back end with `reads_host`; `None` inside graphs.
        adapters: the adapters of the batch's tokens; the loop over layers narrows both together.
        states: where recurrent states are read and written, if the model has any.
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

    def put_embeds(self, embedded: Tensor) -> None:
        """Overwrite rows of `embedded`, `[num_tokens, hidden_size]`, with given embeddings."""
        if self.embed_indices is not None and self.embeds is not None:
            embedded.index_copy_(0, self.embed_indices, self.embeds.to(embedded.dtype))
        if self.images is not None:
            embedded.index_copy_(0, self.images.token_indices, self.images.vectors[0])

    @property
    def deep_vectors(self) -> Sequence[Tensor]:
        """Vectors that the first layers add to the stream, at `images.token_indices`."""
        return () if self.images is None else self.images.vectors[1:]
