"""Where a step's sequences read and write recurrent states, for every kernel that keeps any."""

from typing import NamedTuple

from torch import Tensor


class StatePlaces(NamedTuple):
    """Where the sequences of a step begin and end, and where their states are.

    Attributes:
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's tokens.
        reads: `[num_seqs]` int64, slot of each sequence's state ahead of its tokens.
        save_indptr: `[num_seqs + 1]` int32, bounds of each sequence's saves.
        save_ends: `[num_saves]` int64, index in the step of the token behind the last one that a
            saved state has seen; ascending within a sequence, the last one is the sequence's end.
        save_slots: `[num_saves]` int64, slots that are written.
        is_decode: whether each sequence has one token.
    """

    qo_indptr: Tensor
    reads: Tensor
    save_indptr: Tensor
    save_ends: Tensor
    save_slots: Tensor
    is_decode: bool
