"""The settings with which a model is built. Layers get no other information from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import StartupError
from runtime.models.layers.adapter_slots import AdapterSlots
from runtime.models.layers.expert_counts import ExpertCounts
from runtime.models.layers.stage import ALL_LAYERS, Stage

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`.

    Raises:
        StartupError: models do not run in this dtype.
    """
    if name not in DTYPES:
        raise StartupError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The settings for building a model, besides its own spec.

    Attributes:
        dtype: dtype of weights and activations.
        device: device of weights and activations.
        max_positions: rows of the rotary table; `None` for the model's whole context.
        tp_rank, tp_size: this rank's index among the ranks that share each layer, and their number.
        all_reduce: sums a tensor over these ranks in place and returns it. Needed if `tp_size > 1`.
        sum_place: returns the tensor to which the next input of `all_reduce` should be written, for
            a number of rows and a width; `None` if any tensor will do.
        gather_columns: joins the ranks' `[num_rows, width]` along the columns, in order of rank.
            Without it each rank has the whole head.
        splits_experts: whether each rank holds some whole experts instead of a part of each expert.
        expert_counts: where layers record the chosen experts; `None` if they do not.
        adapters: the LoRA adapters of each step's tokens; `None` if there are none.
        rounds_products: whether float32 operands are rounded to bfloat16 for matrix products, where
            such kernels exist.
        kv_cache_dtype: form of keys and values in the KV cache, a name in
            `kernels.kv_forms.KV_FORMS`.
        linear: name in `kernels.linear.LINEAR` to use for all products; `None` for the fastest on
            the device.
        experts: name in `kernels.experts.EXPERTS`; `None` for the fastest on the device.
        stage: the layers of this rank.
        deterministic: whether a layer that chooses its own kernels must take batch-invariant ones.
    """

    dtype: torch.dtype
    device: torch.device
    max_positions: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    all_reduce: Callable[[Tensor], Tensor] | None = None
    sum_place: Callable[[int, int], Tensor | None] | None = None
    gather_columns: Callable[[Tensor], Tensor] | None = None
    splits_experts: bool = False
    expert_counts: ExpertCounts | None = None
    adapters: AdapterSlots | None = None
    rounds_products: bool = False
    kv_cache_dtype: str = "auto"
    linear: str | None = None
    experts: str | None = None
    stage: Stage = ALL_LAYERS
    deterministic: bool = False

    def splits_head(self, vocab_size: int) -> bool:
        """Whether each rank computes logits for only its own part of a vocabulary of this size."""
        return (
            self.tp_size > 1 and self.gather_columns is not None and vocab_size % self.tp_size == 0
        )
