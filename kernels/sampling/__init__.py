"""Ops from logits to token ids: sampling, penalties, masks and log-probabilities.

Every op works row by row, and a row's result does not depend on the rest of the batch.
"""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.sampling.rows import SamplingRows
from kernels.table import Entry, Table

__all__ = [
    "SAMPLING",
    "SamplingKernels",
    "SamplingRows",
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "best_tokens",
    "gather_logprobs",
    "mask_tokens",
    "nan_rows",
    "sample",
]


class SamplingKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Choose one token per row; see `kernels.sampling.sample`."""

    def apply_penalties(
        self,
        logits: Tensor,
        output_ids: Tensor,
        output_lens: Tensor,
        frequency: Tensor,
        presence: Tensor,
        repetition: Tensor,
        row_index: Tensor | None = None,
    ) -> None:
        """Lower the logits of generated tokens; see `kernels.sampling.apply_penalties`."""

    def apply_logit_bias(
        self, logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor
    ) -> None:
        """Add values to single logits in place; see `kernels.sampling.apply_logit_bias`."""

    def mask_tokens(self, logits: Tensor, row_index: Tensor, token_ids: Tensor) -> None:
        """Set single logits to minus infinity in place; see `kernels.sampling.mask_tokens`."""

    def apply_token_bitmask(
        self, logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None
    ) -> None:
        """Forbid tokens whose bit in a mask is 0; see `kernels.sampling.apply_token_bitmask`."""

    def best_tokens(
        self, logits: Tensor, bitmask: Tensor | None = None, row_index: Tensor | None = None
    ) -> Tensor:
        """Return the token of each row's largest logit; see `kernels.sampling.best_tokens`."""

    def gather_logprobs(
        self, logits: Tensor, token_ids: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of tokens; see `kernels.sampling.gather_logprobs`."""

    def nan_rows(self, logits: Tensor) -> Tensor:
        """Return whether each row has a NaN; see `kernels.sampling.nan_rows`."""


SAMPLING: Table[SamplingKernels] = Table(
    "sampling",
    {
        "reference": Entry("kernels.sampling.reference", invariant=True),
        "cpu": Entry(
            "kernels.sampling.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "triton": Entry(
            "kernels.sampling.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> SamplingKernels:
    return SAMPLING.choose(device_type).kernels


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row.

    A row of temperature 0 takes its largest logit, and of equal logits that of the lowest id. Any
    other row draws from `softmax(logits / temperature)` after its filters:

    - `min_p` 0: top-k and top-p are both applied to this one distribution. A token stays if it is
      among the `top_k` most probable and the mass of the tokens before it, in descending order, is
      below `top_p`.
    - `min_p` > 0: the filters are applied one after another, and the rest is renormalised each
      time: first `top_k`, then `top_p`, then tokens below `min_p` times the largest probability are
      removed.

    Tokens of equal probability rank by ascending id. The most probable token always stays. The draw
    is an inverse CDF over the remaining tokens in the order of their ids. Its uniform number
    depends only on `(seed, position)`, so a recomputed token is the same.

    Args:
        logits: `[batch, vocab_size]` float32; unchanged. A row needs a finite logit and no NaN
            (`nan_rows`) for a meaningful result. Otherwise the result is still a valid id.
        rows: the sampling parameters of the rows.

    Returns:
        `[batch]` int64.
    """
    return _kernels(logits.device.type).sample(logits, rows)


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor,
    output_lens: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
    row_index: Tensor | None = None,
) -> None:
    """Lower the logits of the tokens that a row has generated so far, in place.

    Each token that was generated `count > 0` times is changed in two steps. First, a logit >= 0 is
    divided by `repetition`, and a negative one is multiplied by `repetition`. Then `frequency *
    count + presence` is subtracted. Prompt tokens do not count.

    Args:
        logits: `[batch, vocab_size]` float32, changed in place.
        output_ids: `[num_rows, max_output_len]` int64, generated ids. Entries past a row's length
            are ignored.
        output_lens: `[num_rows]` int64, number of ids in each row.
        frequency: `[num_rows]` float32; 0 has no effect.
        presence: `[num_rows]` float32; 0 has no effect.
        repetition: `[num_rows]` float32; 1 has no effect.
        row_index: `[num_rows]` int64, the row of `logits` for each row of the other tensors,
            without repeats. `None` if the other tensors have one row for each row of `logits`, in
            order.
    """
    _kernels(logits.device.type).apply_penalties(
        logits, output_ids, output_lens, frequency, presence, repetition, row_index
    )


def apply_logit_bias(logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add `values` to single logits in place. If a position is repeated, both values are added.

    Args:
        logits: `[batch, vocab_size]` float32, changed in place.
        row_index: `[n]` int64, the row of each logit.
        token_ids: `[n]` int64, the token of each logit.
        values: `[n]` float32.
    """
    _kernels(logits.device.type).apply_logit_bias(logits, row_index, token_ids, values)


def mask_tokens(logits: Tensor, row_index: Tensor, token_ids: Tensor) -> None:
    """Set single logits to minus infinity in place.

    Args:
        logits: `[batch, vocab_size]` float32, changed in place.
        row_index: `[n]` int64, the row of each logit.
        token_ids: `[n]` int64, the token of each logit.
    """
    _kernels(logits.device.type).mask_tokens(logits, row_index, token_ids)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None) -> None:
    """Set the logits of forbidden tokens to minus infinity in place.

    Args:
        logits: `[batch, vocab_size]` float32, changed in place.
        bitmask: `[num_masks, ceil(vocab_size / 32)]` int32. Token `i` is allowed if bit `i % 32` of
            word `i // 32` is set (xgrammar's layout). A row of -1 allows all tokens.
        row_index: `[num_masks]` int64, the row of `logits` for each mask, without repeats. `None`
            if there is one mask for each row, in order.
    """
    _kernels(logits.device.type).apply_token_bitmask(logits, bitmask, row_index)


def best_tokens(
    logits: Tensor, bitmask: Tensor | None = None, row_index: Tensor | None = None
) -> Tensor:
    """Return the token of the largest logit of each row; of equal logits, that of the lowest id.

    Args:
        logits: `[batch, vocab_size]` float32. Logits of forbidden tokens may be overwritten. A row
            needs a finite logit of an allowed token for a meaningful result.
        bitmask: `[num_masks, ceil(vocab_size / 32)]` int32, the allowed tokens; see
            `apply_token_bitmask`. `None` allows all tokens.
        row_index: `[num_masks]` int64, the row of `logits` for each mask; see
            `apply_token_bitmask`.

    Returns:
        `[batch]` int64; `kernels.greedy.NAN_TOKEN` for a row with a NaN among the allowed logits.
    """
    return _kernels(logits.device.type).best_tokens(logits, bitmask, row_index)


def gather_logprobs(logits: Tensor, token_ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of given tokens and those of the most probable tokens.

    All values are finite: for probability 0 (masked tokens) the value is -1e9.

    Args:
        logits: `[batch, vocab_size]` float32; unchanged.
        token_ids: `[batch, num_ids]` int64, the given tokens.
        top_k: number of most probable tokens to return, 0 for none; limited to `vocab_size`.

    Returns:
        `[batch, num_ids]` float32 log-probabilities of `token_ids`; `[batch, top_k]` float32
        largest log-probabilities in descending order; and the `[batch, top_k]` int64 ids of the
        latter (equal values by ascending id).
    """
    return _kernels(logits.device.type).gather_logprobs(logits, token_ids, top_k)


def nan_rows(logits: Tensor) -> Tensor:
    """Return `[batch]` bool: whether each row of `logits`, `[batch, vocab_size]`, has a NaN."""
    return _kernels(logits.device.type).nan_rows(logits)
