"""The token masks of one step's grammars, computed when the step is sampled."""

from __future__ import annotations

from runtime.ipc.messages import FinishReason
from runtime.scheduler.grammars import Grammars
from runtime.scheduler.table import RequestTable
from runtime.step.step_plan import Int64Array, TokenMasks


class StepMasks:
    """The token masks of one step, computed on first use; implements `MaskSource`.

    Attributes:
        ends: for each row whose grammar cannot continue, the reason; filled by `make`.
    """

    def __init__(self, grammars: Grammars, table: RequestTable, rows: Int64Array) -> None:
        """Prepare the masks of `rows`, the rows of `table` for which a token is sampled."""
        self._grammars = grammars
        self._table = table
        self._rows = rows
        self._masks: TokenMasks | None = None
        self._is_made = False
        self.ends: dict[int, FinishReason] = {}

    def make(self) -> TokenMasks | None:
        """Return the masks, computed at the first call; `None` if no row is constrained."""
        if not self._is_made:
            self._masks, self.ends = self._grammars.make_masks(self._table, self._rows)
            # Set last: if `make_masks` fails, the step is tried again and must compute the masks.
            self._is_made = True
        return self._masks
