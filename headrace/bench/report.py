"""Formats the summary of a benchmark as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.bench.record import PERCENTILES

_COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
_ROWS = {
    "ttft_ms": "TTFT  to the first token",
    "tpot_ms": "TPOT  per token after it",
    "itl_ms": "ITL   between two tokens",
    "e2e_ms": "E2E   to the last token",
}


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format a result of `headrace.bench.record.summarize` as lines of a table."""
    lines = [
        f"requests      {summary['num_completed']} completed, {summary['num_failed']} failed "
        f"in {summary['duration_s']:.2f} s",
        f"in flight     {summary['mean_concurrency']:.1f} mean, {summary['max_concurrency']} most",
        f"tokens        {summary['input_tokens']} in ({summary['cached_tokens']} from the cache), "
        f"{summary['output_tokens']} out",
        f"throughput    {summary['request_per_s']:.2f} requests/s, "
        f"{summary['input_tok_per_s']:.1f} input tok/s, "
        f"{summary['output_tok_per_s']:.1f} output tok/s, "
        f"{summary['total_tok_per_s']:.1f} total tok/s",
    ]
    if "objectives_ms" in summary:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in summary["objectives_ms"].items())
        lines.append(
            f"goodput       {summary['goodput_request_per_s']:.2f} requests/s, "
            f"{summary['good_share']:.1%} within {limits}"
        )
    lines += ["", *latency_lines(summary)]
    lines += [f"error         {text}" for text in summary.get("errors", ())]
    return lines


def latency_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format the latencies of a summary as lines of a table; omit latencies without values."""
    head = f"{'milliseconds':26}" + "".join(f"{name:>10}" for name in _COLUMNS)
    rows = [
        f"{title:26}" + "".join(f"{summary[name][column]:>10.2f}" for column in _COLUMNS)
        for name, title in _ROWS.items()
        if summary.get(name)
    ]
    return [head, *rows]
