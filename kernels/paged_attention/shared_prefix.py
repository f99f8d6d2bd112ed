"""The groups of decode rows with the same first keys, laid out for the kernel that shares them.

The groups change when a request starts or ends, so the host computes them and sends them then;
graphs read them from fixed addresses.

Source: attention over a shared prefix as matrix products of many queries, merged by log-sum-exp
with each query's own part: Hydragen (Juravsky et al., 2024), FlashInfer's cascade (Ye et al.,
2024).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from kernels.paged_attention.prefix_group import MAX_GROUPS, PrefixGroup

if TYPE_CHECKING:
    from kernels.paged_attention.triton_plan import AttentionWorkspace

# int32 fields of an item, padded so that one item is one 32-byte sector.
ITEM_FIELDS = 8
# Rows of a block of queries: the heads that share a key head, for several members of a group.
BLOCK_ROWS = 64
# Keys per block; shared lengths and the chunks that they are split into are multiples of it.
KEY_GRAIN = 64
# The desired number of programs in flight on each multiprocessor.
PROGRAMS = 2
# Chunks of a prefix: adding their results for each member has a cost too.
_MAX_PARTS = 32
_MIN_CHUNK = 256


class SharedPrefixes:
    """Device memory of a decode step's groups, and of the results of chunks of keys.

    Attributes:
        max_seqs: most sequences of a step.
        block_rows: rows of a block of queries.
        members_a_block: most sequences per block.
        max_items: most programs in a launch for a step of `max_seqs`, see `items_for`.
        lens: `[max_seqs]` int32, keys of each sequence that its group's programs process.
        parts: `[max_seqs]` int32, into how many chunks they are split.
        members: `[max_seqs]` int32, the groups' members, one group after the other.
        items: `[max_items, 8]` int32: a member, first key, end of keys, first entry of `members`
            and how many, the chunk's number.
        num_items: `[8]` int32, the first is the number of items.
        first_slots: `[max_seqs]` int32, where each sequence's chunk results begin, shared ones
            first.
        partials: `[slots, num_heads, head_dim rounded up]` float32, outputs of single chunks.
        partial_lse: `[slots, num_heads]` float32, their base-2 log-sum-exp.
    """

    def __init__(self, workspace: "AttentionWorkspace") -> None:
        """Allocate for the steps and layers of `workspace`, without any group."""
        self.max_seqs = workspace.max_seqs
        device, num_heads = workspace.totals.device, workspace.num_heads
        group_rows = triton.next_power_of_2(num_heads // workspace.num_kv_heads)
        self.block_rows = max(BLOCK_ROWS, group_rows)
        self.members_a_block = self.block_rows // group_rows
        programs = workspace.multiprocessors * PROGRAMS
        self._wanted_items = max(1, programs // workspace.num_kv_heads)
        self.max_items = self.items_for(self.max_seqs)
        # The host's numbers, in one buffer so that one copy sends all of them.
        padded = -(-self.max_seqs // ITEM_FIELDS) * ITEM_FIELDS
        ends = np.cumsum([ITEM_FIELDS, *[padded] * 3, self.max_items * ITEM_FIELDS]).tolist()
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self._numbers = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self.num_items, self.lens, self.parts, self.members, self.items = (
            self._numbers[start:end] for start, end in self._bounds
        )
        self.first_slots = torch.empty(self.max_seqs, dtype=torch.int32, device=device)
        own_slots, *sizes = workspace.partials.shape
        slots = own_slots + self.max_items * self.members_a_block
        self.partials = workspace.partials.new_empty(slots, *sizes)
        self.partial_lse = workspace.partial_lse.new_empty(slots, num_heads)

    def items_for(self, num_seqs: int) -> int:
        """Return the most items of a step of `num_seqs` sequences."""
        return self._wanted_items + -(-num_seqs // self.members_a_block) + MAX_GROUPS

    # Buffers created in inference mode can only be written in inference mode.
    @torch.inference_mode()
    def put(self, groups: Sequence[PrefixGroup]) -> None:
        """Send the groups for the following steps; in stream order, never blocks.

        Args:
            groups: at most `MAX_GROUPS`; a sequence is in at most one. Lengths are rounded down to
                `KEY_GRAIN`.
        """
        assert len(groups) <= MAX_GROUPS
        pinned = torch.zeros(
            len(self._numbers), dtype=torch.int32, pin_memory=self._numbers.is_cuda
        )
        self._fill(pinned.numpy(), [(each.members, each.length // KEY_GRAIN) for each in groups])
        # The caching host allocator keeps the buffer until the copy is done.
        self._numbers.copy_(pinned, non_blocking=True)

    def _fill(
        self, numbers: NDArray[np.int32], groups: list[tuple[NDArray[np.int64], int]]
    ) -> None:
        """Write the lists; lengths are in blocks of keys here."""
        count, lens, parts, order, flat = (numbers[start:end] for start, end in self._bounds)
        items = flat.reshape(-1, ITEM_FIELDS)
        blocks = [-(-len(members) // self.members_a_block) for members, _ in groups]
        work = sum(b * length for b, (_, length) in zip(blocks, groups, strict=True))
        chunk = max(_MIN_CHUNK // KEY_GRAIN, -(-work // self._wanted_items))
        first = written = 0
        for members, length in groups:
            cut = -(-length // max(chunk, -(-length // _MAX_PARTS)))
            share = -(-length // max(cut, 1))
            cut = -(-length // max(share, 1))
            end = first + len(members)
            lens[members], parts[members] = length * KEY_GRAIN, cut
            order[first:end] = members
            begins = np.arange(first, end, self.members_a_block)
            part = np.arange(cut)[:, None]
            mine = items[written : written + cut * len(begins)].reshape(cut, len(begins), -1)
            mine[..., 0] = members[0]
            mine[..., 1] = part * share * KEY_GRAIN
            mine[..., 2] = np.minimum((part + 1) * share, length) * KEY_GRAIN
            mine[..., 3] = begins
            mine[..., 4] = np.minimum(end - begins, self.members_a_block)
            mine[..., 5] = part
            written += cut * len(begins)
            first = end
        count[0] = written
