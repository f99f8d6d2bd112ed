"""Attention with FlashInfer's kernels if the host knows the lengths, and with Triton's otherwise.

FlashInfer is used only on request (`--attention-backend flashinfer`), because its kernels are
compiled at the first start, a minute or more each. Prompt chunks run FlashAttention-3 on a Hopper
GPU. Decode steps without a CUDA graph run FlashInfer's tensor-core kernels. Decode steps in graphs,
and rows that decode beside prompts, run the Triton kernels, which need no planning on the host
(`docs/decisions/0012-launches-prompts-and-sums-on-a-gpu.md`).

Source: FlashInfer (Ye et al., 2025), https://docs.flashinfer.ai/api/attention.html.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.models.attention.backend import AttentionLayer, AttentionShape, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.triton import TritonAttention

# Work space for the partial results of sequences whose keys are split. This size is enough for 16
# query heads per key head on most GPUs.
WORKSPACE_BYTES = 384 * 2**20
# The layers that share one plan of a step: those of equal shape and scale.
_Kind = tuple[AttentionShape, float]
# The device copies a plan from the wrapper's host memory only when it reaches the step. Two steps
# may be in flight while a third is planned, so wrappers take turns.
_NUM_TURNS = 3


class FlashInferAttention(TritonAttention):
    """Plans FlashInfer's kernels once a step for each kind of layer.

    A plan covers the step's prompt chunks, or, in a step without prompts, its decoding rows.
    """

    reads_host = True

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Import FlashInfer; its kernels are loaded or compiled when they are first used.

        Raises:
            RuntimeError: FlashInfer is not installed, or the device is not a GPU.
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
        self._make_prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make_decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._make_decode = partial(make_decode, use_tensor_cores=True)
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[_Kind, bool, int], Any] = {}
        self._planned: dict[tuple[_Kind, int], Any] = {}
        self._turn = 0

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._planned.clear()
        self._turn = (self._turn + 1) % _NUM_TURNS

    def _attend_pages(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, batch: ForwardBatch, num_seqs: int
    ) -> None:
        host, num_decodes = batch.host, batch.num_decodes
        # For tokens that attend to later tokens, FlashInfer needs a mask from the host, with a bit
        # for each pair of tokens.
        is_plain = layer.is_plain and batch.key_ends is None
        if host is None or num_decodes is None or not is_plain:
            super()._attend_pages(layer, q, out, batch, num_seqs)
            return
        first = num_decodes if num_decodes < len(batch.seq_lens) else 0
        if first:
            super()._attend_pages(layer, q, out, batch, first)
            if first == num_seqs:
                return
        key = (layer.shape, layer.scale), num_seqs
        if key not in self._planned:
            self._planned[key] = self._plan_seqs(layer, q, batch, slice(first, num_seqs))
        tokens = slice(int(host.qo_indptr[first]), int(host.qo_indptr[num_seqs]))
        kv = batch.kv[layer.layer_idx]
        self._planned[key].run(q[tokens], (kv.k, kv.v), out=out[tokens].unflatten(1, q.shape[1:]))

    def _wrapper(self, kind: _Kind, device: torch.device, *, decodes: bool) -> Any:
        """Return FlashInfer's wrapper object for the layers of `kind`.

        The object is created at its first use.
        """
        key = kind, decodes, self._turn
        if key not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            make = self._make_decode if decodes else self._make_prefill
            self._wrappers[key] = make(self._workspace, kv_layout="HND")
        return self._wrappers[key]

    def _plan_seqs(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, seqs: slice) -> Any:
        """Return FlashInfer's wrapper, planned for the sequences `seqs` of the step."""
        host = batch.host
        assert host is not None
        decodes = seqs.stop == batch.num_decodes
        wrapper = self._wrapper((layer.shape, layer.scale), q.device, decodes=decodes)
        kv = batch.kv[layer.layer_idx]
        page_size = kv.k.shape[2]
        lengths = host.seq_lens[seqs]
        num_pages = -(-lengths // page_size)
        indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(num_pages, out=indptr[1:])
        window_table = host.window_table if kv.is_windowed else None
        table = (host.page_table if window_table is None else window_table)[seqs]
        pages = table[np.arange(table.shape[1]) < num_pages[:, None]]
        arrays = [indptr, pages, lengths - (num_pages - 1) * page_size]
        options: dict[str, Any] = {}
        if not decodes:
            starts = host.qo_indptr[seqs.start : seqs.stop + 1]
            arrays.insert(0, starts - starts[0])
            options["causal"] = True
        wrapper.plan(
            *(torch.from_numpy(each.astype(np.int32)) for each in arrays),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            page_size,
            sm_scale=layer.scale,
            window_left=layer.window_left,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
            **options,
        )
        return wrapper
