"""Groups of decoding sequences with a common prefix, in the layout that attention reads.

The groups change when a request starts or ends. The host computes them then and sends them to the
device; CUDA graphs read them from fixed addresses.

Source: attention over a shared prefix as matrix products of many queries, combined by log-sum-exp
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

# int32 fields of a work item, padded so that one item is one 32-byte sector.
ITEM_FIELDS = 8
# Rows of a block of queries. A block has the heads that share a key head, for several members of a
# group.
BLOCK_ROWS = 64
# Keys per block. Shared lengths, and the chunks into which they are split, are multiples of it.
KEY_GRAIN = 64
# The desired number of programs in flight on each multiprocessor.
PROGRAMS = 2
# The most chunks of a prefix. More chunks would cost more, because their results are added for each
# member.
_MAX_PARTS = 32
_MIN_CHUNK = 256


class SharedPrefixes:
    """Device memory for the groups of a decode step, and for the results of chunks of shared keys.

    Attributes:
        max_seqs: most sequences of a step.
        block_rows: rows of a block of queries.
        members_a_block: most sequences per block.
        max_items: most programs in a launch for a step of `max_seqs`; see `items_for`.
        lens: `[max_seqs]` int32, for each sequence the number of keys that its group's programs
            process.
        parts: `[max_seqs]` int32, number of chunks into which these keys are split.
        members: `[max_seqs]` int32, the members of all groups, one group after the other.
        items: `[max_items, 8]` int32. An item is the work of one program: a member of the group,
            first key, end of keys, first entry of `members`, number of entries, and number of the
            chunk.
        num_items: `[8]` int32; the first entry is the number of items.
        first_slots: `[max_seqs]` int32, the slot of each sequence's first chunk result; results of
            shared chunks come first.
        partials: `[slots, num_heads, head_dim rounded up]` float32, results of single chunks.
        partial_lse: `[slots, num_heads]` float32, base-2 log-sum-exp of single chunks.
    """

    def __init__(self, workspace: "AttentionWorkspace") -> None:
        """Allocate for the steps and layers of `workspace`. There are no groups yet."""
        self.max_seqs = workspace.max_seqs
        device, num_heads = workspace.totals.device, workspace.num_heads
        group_rows = triton.next_power_of_2(num_heads // workspace.num_kv_heads)
        self.block_rows = max(BLOCK_ROWS, group_rows)
        self.members_a_block = self.block_rows // group_rows
        programs = workspace.multiprocessors * PROGRAMS
        self._wanted_items = max(1, programs // workspace.num_kv_heads)
        self.max_items = self.items_for(self.max_seqs)
        # All numbers from the host are in one buffer, so that one copy sends them.
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
        """Return the largest number of work items of a step of `num_seqs` sequences."""
        return self._wanted_items + -(-num_seqs // self.members_a_block) + MAX_GROUPS

    # Buffers that are created in inference mode can only be written in inference mode.
    @torch.inference_mode()
    def put(self, groups: Sequence[PrefixGroup]) -> None:
        """Send the groups for the following steps, in stream order, without blocking.

        Args:
            groups: at most `MAX_GROUPS`; a sequence is in at most one group. Lengths are rounded
                down to multiples of `KEY_GRAIN`.
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
        """Write the lists of `SharedPrefixes` to `numbers`; lengths are in blocks of keys."""
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
