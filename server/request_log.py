"""One log line per finished request, for `--log-requests`: numbers, never the texts."""

from __future__ import annotations

import logging

from runtime.client.recorder import RequestRecord

logger = logging.getLogger("server.requests")


def log_record(record: RequestRecord) -> None:
    """Write the line."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}"
    logger.info(
        "request rid=%s prompt=%d cached=%d output=%d ttft=%s e2e=%.3f end=%s",
        record.rid,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        ttft,
        record.e2e_s,
        record.outcome,
    )
