"""The requests of a benchmark, their measured times, and statistics over many requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

PERCENTILES = (50, 90, 99)


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send; exactly one of `input_ids`, `text` and `messages` is set.

    Attributes:
        prompt_len: number of tokens of the prompt, if it is known before the server reports it.
    """

    output_len: int
    input_ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_len: int = 0


class RequestRecord(msgspec.Struct, kw_only=True):
    """The measurements of one request; times are `time.perf_counter()` seconds.

    Attributes:
        event_times: the times at which pieces of output arrived.
        event_tokens: for each piece its number of tokens.
        output_tokens: number of output tokens that the server reported; the sum of `event_tokens`
            may differ.
        error: the reason of a failure; empty if the request was answered completely.
    """

    index: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started: float = 0.0
    finished: float = 0.0
    event_times: list[float] = []
    event_tokens: list[int] = []
    error: str = ""

    def add(self, when: float, num_tokens: int) -> None:
        """Record that a piece of output with `num_tokens` tokens arrived at the time `when`."""
        self.event_times.append(when)
        self.event_tokens.append(num_tokens)

    @property
    def e2e_s(self) -> float:
        """Seconds from sending the request to the last byte of its answer."""
        return self.finished - self.started

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first piece of output."""
        return (self.event_times[0] if self.event_times else self.finished) - self.started

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first piece; `None` if there was only one piece."""
        if len(self.event_times) < 2:
            return None
        after_first = self.output_tokens - self.event_tokens[0]
        if after_first <= 0:
            return None
        return (self.event_times[-1] - self.event_times[0]) / after_first

    def gaps_s(self) -> list[float]:
        """Return the seconds between consecutive tokens.

        If several tokens arrived in one piece, the time since the piece before is divided evenly.
        """
        gaps: list[float] = []
        for before, when, count in zip(
            self.event_times, self.event_times[1:], self.event_tokens[1:], strict=False
        ):
            gaps.extend([(when - before) / count] * count)
        return gaps


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted numbers, interpolated linearly between neighbours."""
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum of `values` by name; empty if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    result = {"mean": math.fsum(ordered) / len(ordered)}
    result |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    result["max"] = ordered[-1]
    return result


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return for each of the four latencies its values in milliseconds, in order of the records."""
    tpots = (record.tpot_s for record in records)
    return {
        "ttft_ms": [record.ttft_s * 1e3 for record in records],
        "tpot_ms": [tpot * 1e3 for tpot in tpots if tpot is not None],
        "itl_ms": [gap * 1e3 for record in records for gap in record.gaps_s()],
        "e2e_ms": [record.e2e_s * 1e3 for record in records],
    }


def meets(record: RequestRecord, objectives_ms: dict[str, float]) -> bool:
    """Whether a request's latencies are within all limits.

    Args:
        record: the measured request.
        objectives_ms: limits in milliseconds, by `ttft`, `tpot` and `e2e`.
    """
    tpot = record.tpot_s
    measured = {
        "ttft": record.ttft_s * 1e3,
        "tpot": 0.0 if tpot is None else tpot * 1e3,
        "e2e": record.e2e_s * 1e3,
    }
    return all(measured[name] <= limit for name, limit in objectives_ms.items())


def summarize(
    records: Sequence[RequestRecord], objectives_ms: dict[str, float] | None = None
) -> dict[str, Any]:
    """Compute the throughput over all records, and the latencies of requests that succeeded.

    Args:
        records: the requests' records, at least one.
        objectives_ms: the limits of the goodput; see `meets`.
    """
    done = [record for record in records if not record.error]
    first = min(record.started for record in records)
    duration = max(record.finished for record in records) - first
    num_input = sum(record.prompt_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    per_second = 1 / duration if duration > 0 else 0.0
    summary: dict[str, Any] = {
        "num_completed": len(done),
        "num_failed": len(records) - len(done),
        "duration_s": duration,
        "input_tokens": num_input,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "output_tokens": num_output,
        "num_events": sum(len(record.event_times) for record in done),
        "request_per_s": len(done) * per_second,
        "input_tok_per_s": num_input * per_second,
        "output_tok_per_s": num_output * per_second,
        "total_tok_per_s": (num_input + num_output) * per_second,
        "mean_concurrency": sum(record.e2e_s for record in done) * per_second,
        "max_concurrency": _max_concurrency(done),
    }
    summary |= {name: distribution(values) for name, values in latencies_ms(done).items()}
    if objectives_ms:
        num_good = sum(meets(record, objectives_ms) for record in done)
        summary["objectives_ms"] = objectives_ms
        summary["goodput_request_per_s"] = num_good * per_second
        summary["good_share"] = num_good / len(records)
    errors = sorted({record.error for record in records if record.error})
    if errors:
        summary["errors"] = errors[:10]
    return summary


def _max_concurrency(records: Sequence[RequestRecord]) -> int:
    changes = sorted(
        [(record.started, 1) for record in records] + [(record.finished, -1) for record in records]
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
