"""A progress bar for large batches of the offline engine."""

from __future__ import annotations

from typing import Any

# Batches with fewer requests show no bar, because they finish before it is useful.
MIN_REQUESTS = 100


class Progress:
    """Counts finished requests and generated tokens; shows a bar on a terminal."""

    def __init__(self, num_requests: int, show: bool | None) -> None:
        """Begin to count up to `num_requests`.

        If `show` is `None`, a bar is shown only for a large batch on a terminal.
        """
        self._bar: Any = None
        self._num_tokens = 0
        if show is False or (show is None and num_requests < MIN_REQUESTS):
            return
        from tqdm import tqdm

        # tqdm shows a bar only on a terminal if `disable` is None.
        hide = None if show is None else False
        self._bar = tqdm(total=num_requests, desc="Generating", unit="req", disable=hide)

    def advance(self, num_tokens: int) -> None:
        """Count one finished request and the tokens that it generated."""
        if self._bar is None:
            return
        self._num_tokens += num_tokens
        elapsed_s = self._bar.format_dict["elapsed"]
        if elapsed_s:
            rate = self._num_tokens / elapsed_s
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
