"""A bar over the programs of a batch."""

from __future__ import annotations


class ProgressBar:
    """Counts programs that are done, on the terminal or in a notebook."""

    def __init__(self, total: int | None) -> None:
        """Show an empty bar; `total` is None where nobody knows."""
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total)

    def advance(self) -> None:
        """One more is done."""
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
