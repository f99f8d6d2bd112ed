"""The traces of all ranks in one file, so that Perfetto shows them side by side."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

WAIT_S = 120.0
_POLL_S = 0.1


def merge_when_written(sources: Sequence[Path], target: Path) -> threading.Thread:
    """Merge `sources` into `target` on a thread, once every rank has written its own."""
    thread = threading.Thread(
        target=_wait_and_merge, args=(sources, target), name="merge-traces", daemon=True
    )
    thread.start()
    return thread


def _wait_and_merge(sources: Sequence[Path], target: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(source.exists() for source in sources):
        if time.monotonic() > deadline:
            logger.error("Traces of some ranks are missing: %s is not written", target)
            return
        time.sleep(_POLL_S)
    try:
        merge(sources, target)
    except Exception:
        logger.exception("The traces could not be merged")


def merge(sources: Sequence[Path], target: Path) -> None:
    """Write one trace with the events of all `sources`; each rank keeps its lanes to itself."""
    merged: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    for rank, source in enumerate(sources):
        with gzip.open(source, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        for event in trace.pop("traceEvents"):
            _move(event, rank, len(sources))
            events.append(event)
        merged = {**trace, **merged}
    part = target.with_name(f".{target.name}.part")
    with gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump({**merged, "traceEvents": events}, file)
    os.replace(part, target)


def _move(event: dict[str, Any], rank: int, num_ranks: int) -> None:
    # Lanes are told apart by their process, which may be a GPU of the same number on every rank.
    if "pid" in event:
        event["pid"] = f"TP-{rank} {event['pid']}"
    if event.get("name") == "process_name":
        event["args"]["name"] = f"TP-{rank} {event['args']['name']}"
    # Arrows are told apart by their id, a number.
    if isinstance(event.get("id"), int):
        event["id"] = event["id"] * num_ranks + rank
