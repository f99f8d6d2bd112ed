"""The slots of recurrent states in a step, for all kernels with such states."""

from typing import NamedTuple

from torch import Tensor


class StatePlaces(NamedTuple):
    """The bounds of a step's sequences, and the slots of their recurrent states.

    Attributes:
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's tokens.
        reads: `[num_seqs]` int64, slot of each sequence's state before its tokens.
        save_indptr: `[num_seqs + 1]` int32, bounds of each sequence's saves. A save writes the
            state after one of the step's tokens to a slot.
        save_ends: `[num_saves]` int64, one more than the index, in the step, of the last token that
            is part of the saved state. Ascending within a sequence; the last one is the sequence's
            end.
        save_slots: `[num_saves]` int64, slots that are written.
        is_decode: whether each sequence has one token.
    """

    qo_indptr: Tensor
    reads: Tensor
    save_indptr: Tensor
    save_ends: Tensor
    save_slots: Tensor
    is_decode: bool
