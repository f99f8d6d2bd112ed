"""A progress bar for batches that take a while."""

from __future__ import annotations

from typing import Any

# Smaller batches are over before a bar is read.
MIN_REQUESTS = 100


class Progress:
    """Counts finished requests and generated tokens; a bar on a terminal, else nothing."""

    def __init__(self, num_requests: int, show: bool | None) -> None:
        """Expect `num_requests`; `show` none means: a large batch on a terminal."""
        self._bar: Any = None
        self._num_tokens = 0
        if show is False or (show is None and num_requests < MIN_REQUESTS):
            return
        from tqdm import tqdm

        # tqdm takes None for "only on a terminal".
        hide = None if show is None else False
        self._bar = tqdm(total=num_requests, desc="Generating", unit="req", disable=hide)

    def advance(self, num_tokens: int) -> None:
        """Count one request that is done."""
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
