"""Attention on a GPU: Triton over the pages, planned on the device, safe inside CUDA graphs.

Whole prompts, whose keys are still in the same tensor as their queries, use the device's best
kernel for plain tensors where that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.paged_attention.prefix_group import PrefixGroup
from kernels.paged_attention.shared_prefix import SharedPrefixes
from kernels.paged_attention.triton import (
    AttentionPlan,
    AttentionWorkspace,
    plan_attention,
    run_attention,
)
from kernels.prompt_attention import PROMPT_ATTENTION
from kernels.rope import ROPE
from kernels.table import Choice
from runtime.models.attention.backend import AttentionLayer, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.rotation import rotate_and_write


class TritonAttention:
    """Split-key decode and blocked extend kernels; the host never reads a length from the device.

    The work lists of a step are written when its first layer runs, once per distinct window.
    """

    is_graph_safe = True
    reads_host = False

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Choose kernels for `device_type`; work space is sized by `limits` when first needed."""
        rope = ROPE.choose(device_type)
        prompt = PROMPT_ATTENTION.choose(device_type)
        self.choices: tuple[Choice[Any], ...] = (rope, prompt)
        self._rope = rope.kernels
        # The plain-torch implementation exists only for tests.
        self._prompt = None if prompt.name == "reference" else prompt.kernels
        self._limits = limits
        self._workspaces: dict[int, AttentionWorkspace] = {}
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        self._prefixes: SharedPrefixes | None = None
        # Kinds of layers whose kernels for whole prompts are ready.
        self._ready: set[tuple[int, int, int, float]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last step's work lists."""
        del batch
        self._plans.clear()

    def put_prefixes(self, groups: Sequence[PrefixGroup]) -> None:
        """See `SharesPrefixes.put_prefixes`; does nothing before the first batch that may share."""
        if self._prefixes is not None:
            self._prefixes.put(groups)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend one layer; see `AttentionBackend.run`."""
        q = rotate_and_write(self._rope, layer, qkv, batch)
        prompts = self._whole_prompts(layer, q, batch)
        num_rest = len(qkv) - sum(prompts)
        if prompts and not num_rest:
            return self._attend_prompts(layer, qkv, prompts)
        # Rows of padding after the last sequence's tokens are not written; see `ForwardBatch`.
        out = qkv.new_empty(len(qkv), layer.num_heads * layer.head_dim)
        num_seqs = len(batch.seq_lens) - len(prompts)
        self._attend_pages(layer, q[:num_rest], out[:num_rest], batch, num_seqs)
        if prompts:
            out[num_rest:] = self._attend_prompts(layer, qkv[num_rest:], prompts)
        return out

    def _attend_pages(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, batch: ForwardBatch, num_seqs: int
    ) -> None:
        """Attend in the first `num_seqs` sequences, over their pages, into `out`."""
        key = layer.window_left, num_seqs
        plan = self._plans.get(key) or self._plan(key, layer, batch, len(q))
        kv = batch.kv[layer.layer_idx]
        run_attention(plan, q, kv.k, kv.v, batch.page_table, layer.scale, out, batch.key_ends)

    def _whole_prompts(
        self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch
    ) -> Sequence[int]:
        """Return the lengths of the step's last prompts for which plain keys are faster."""
        kernels, lengths, window = self._prompt, batch.whole_prompts, layer.window_left
        if kernels is None or not lengths or not kernels.supports(q):
            return ()
        if batch.key_ends is not None:
            # Those kernels are causal.
            return ()
        first = len(lengths)
        while first and lengths[first - 1] >= kernels.MIN_LENGTH:
            if 0 <= window < lengths[first - 1] - 1:
                break
            first -= 1
        return lengths[first:]

    def _attend_prompts(self, layer: AttentionLayer, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        assert self._prompt is not None
        heads = qkv.unflatten(1, (-1, layer.head_dim))
        q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        self._prepare_prompts(layer, q)
        return self._prompt.prompt_attention(q, k, v, lengths, layer.scale)

    def _prepare_prompts(self, layer: AttentionLayer, q: Tensor) -> None:
        """Prepare kernels for all prompts at the first whole one, which runs at start-up."""
        kind = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale
        if kind in self._ready:
            return
        self._ready.add(kind)
        if self._prompt is not None and self._limits.max_prompt_tokens:
            longest, most = len(layer.cos_sin), self._limits.max_prompt_tokens
            self._prompt.prepare(q, layer.num_kv_heads, longest, most, layer.scale)

    def _plan(
        self,
        key: tuple[int, int],
        layer: AttentionLayer,
        batch: ForwardBatch,
        num_tokens: int,
    ) -> AttentionPlan:
        """Write the work lists of the first `key[1]` sequences."""
        window, num_seqs = key
        workspace = self._workspaces.get(window)
        if workspace is None:
            workspace = AttentionWorkspace(
                self._limits.max_seqs,
                self._limits.max_tokens,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                batch.seq_lens.device,
            )
            self._workspaces[window] = workspace
        if batch.shares_prefixes and self._prefixes is None:
            self._prefixes = SharedPrefixes(workspace)
        num_chunks = len(batch.seq_lens) - (batch.num_decodes or 0)
        plan = plan_attention(
            workspace,
            batch.seq_lens[:num_seqs],
            batch.qo_indptr[: num_seqs + 1],
            num_tokens,
            batch.num_decodes,
            window,
            # A window begins at another key for each sequence.
            self._prefixes if batch.shares_prefixes and window < 0 else None,
            short_prompts=len(batch.whole_prompts) == num_chunks,
        )
        self._plans[key] = plan
        return plan
