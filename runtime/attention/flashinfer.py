"""FlashInfer for prompt chunks on pages; everything else as in `runtime.attention.triton`.

On request only (`--attention-backend flashinfer`): its kernels are compiled when first used, which
takes a minute or more, unless the wheel with compiled kernels is installed. Its decode kernels must
be planned on the host before each step and are not faster than ours, which plan on the device
(`docs/decisions/0007-gpu-step.md`), so decode stays with Triton, graphs included. A prompt chunk on
a Hopper GPU runs FlashAttention-3 here.

Source: FlashInfer (Ye et al., 2025), https://docs.flashinfer.ai/api/attention.html.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.attention.backend import AttentionLayer, StepLimits
from runtime.attention.triton import TritonAttention
from runtime.forward_batch import ForwardBatch

_WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention(TritonAttention):
    """Prompt chunks by FlashInfer where the host knows their lengths, which it does outside graphs.

    Two plans a step: one of ours for decoding rows, one of FlashInfer's for the chunks.
    """

    reads_host = True

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Import FlashInfer; its kernels are loaded or compiled at the first prompt.

        Raises:
            RuntimeError: it is not installed, or this is no GPU.
        """
        if device_type != "cuda":
            raise RuntimeError("The flashinfer attention backend needs a CUDA device.")
        try:
            import flashinfer
        except ImportError as error:
            raise RuntimeError(
                "The flashinfer attention backend needs the package flashinfer-python "
                f"(pip install 'headrace[cuda]'): {error}"
            ) from error
        super().__init__(device_type, limits)
        self._make = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        self._wrappers: dict[int, Any] = {}
        self._planned: set[tuple[int, int]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._planned.clear()

    def _attend_pages(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, batch: ForwardBatch, num_seqs: int
    ) -> None:
        host, num_decodes = batch.host, batch.num_decodes
        if host is None or num_decodes is None or num_decodes == num_seqs:
            super()._attend_pages(layer, q, out, batch, num_seqs)
            return
        if num_decodes:
            super()._attend_pages(layer, q, out, batch, num_decodes)
        wrapper = self._wrapper(layer, q, batch, num_seqs)
        tokens = slice(int(host.qo_indptr[num_decodes]), int(host.qo_indptr[num_seqs]))
        kv = batch.kv[layer.layer_idx]
        wrapper.run(q[tokens], (kv.k, kv.v), out=out[tokens].unflatten(1, q.shape[1:]))

    def _wrapper(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, num_seqs: int) -> Any:
        """Return the wrapper of the layer's window, planned for the chunks of this step."""
        window = layer.window_left
        if window not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            self._wrappers[window] = self._make(self._workspace, kv_layout="HND")
        wrapper = self._wrappers[window]
        if (window, num_seqs) in self._planned:
            return wrapper
        self._planned.add((window, num_seqs))
        host, first = batch.host, batch.num_decodes
        assert host is not None
        page_size = batch.kv[layer.layer_idx].k.shape[2]
        lengths = host.seq_lens[first:num_seqs]
        num_pages = -(-lengths // page_size)
        indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(num_pages, out=indptr[1:])
        table = host.page_table[first:num_seqs]
        pages = table[np.arange(table.shape[1]) < num_pages[:, None]]
        starts = host.qo_indptr[first : num_seqs + 1] - host.qo_indptr[first]
        last = lengths - (num_pages - 1) * page_size
        wrapper.plan(
            *(torch.from_numpy(each.astype(np.int32)) for each in (starts, indptr, pages, last)),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            page_size,
            causal=True,
            sm_scale=layer.scale,
            window_left=window,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return wrapper
