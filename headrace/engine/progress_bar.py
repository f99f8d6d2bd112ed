"""A progress bar for long batches."""

from __future__ import annotations

from typing import Any

# Smaller batches show no bar: they finish before a bar is useful.
MIN_REQUESTS = 100


class Progress:
    """Counts finished requests and generated tokens; shows a bar on a terminal."""

    def __init__(self, num_requests: int, show: bool | None) -> None:
        """Expect `num_requests`; with `show` None, only a large batch on a terminal shows a bar."""
        self._bar: Any = None
        self._num_tokens = 0
        if show is False or (show is None and num_requests < MIN_REQUESTS):
            return
        from tqdm import tqdm

        # For tqdm None means "only on a terminal".
        hide = None if show is None else False
        self._bar = tqdm(total=num_requests, desc="Generating", unit="req", disable=hide)

    def advance(self, num_tokens: int) -> None:
        """Count one finished request."""
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
