"""A progress bar for the programs of a batch."""

from __future__ import annotations


class ProgressBar:
    """Shows how many programs of a batch are done, on the terminal or in a notebook."""

    def __init__(self, total: int | None) -> None:
        """Show an empty bar; `total` is None if unknown."""
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total)

    def advance(self) -> None:
        """Count one more finished program."""
        self._bar.update()

    def close(self) -> None:
        """Stop updating the bar and leave it on screen."""
        self._bar.close()
