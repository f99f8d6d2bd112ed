"""Latencies of records with known times, and statistics over many."""

import math

import pytest

from headrace.bench.record import RequestRecord, distribution, meets, percentile, summarize
from headrace.bench.report import summary_lines


def record(index: int = 0, start: float = 10.0, **changes) -> RequestRecord:
    values = {
        "prompt_tokens": 100,
        "output_tokens": 5,
        "started": start,
        "finished": start + 1.0,
        "event_times": [start + 0.2, start + 0.4, start + 1.0],
        "event_tokens": [1, 1, 3],
    }
    return RequestRecord(index=index, **(values | changes))


def test_latencies_of_one_request() -> None:
    one = record()
    assert one.ttft_s == pytest.approx(0.2)
    assert one.e2e_s == pytest.approx(1.0)
    assert one.tpot_s == pytest.approx(0.8 / 4)
    # Three tokens that came together share their gap.
    assert one.gaps_s() == pytest.approx([0.2, 0.2, 0.2, 0.2])


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    one = record(event_times=[10.5], event_tokens=[1], output_tokens=1)
    assert one.tpot_s is None
    assert one.gaps_s() == []
    assert summarize([one])["tpot_ms"] == {}


def test_the_servers_count_decides_where_pieces_hide_tokens() -> None:
    # Ten tokens in three pieces, none of which told how many it held.
    one = record(event_tokens=[1, 1, 1], output_tokens=10)
    assert one.tpot_s == pytest.approx(0.8 / 9)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (100, 4.0), (90, 3.7)])
def test_percentiles_lie_between_neighbours(percent: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(expected)


def test_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 50))
    assert distribution([]) == {}


def test_summary_counts_only_what_succeeded() -> None:
    records = [record(0, 10.0), record(1, 10.5), record(2, 10.5, error="HTTP 503", output_tokens=0)]
    summary = summarize(records, {"ttft": 500, "tpot": 150})
    assert (summary["num_completed"], summary["num_failed"]) == (2, 1)
    assert summary["duration_s"] == pytest.approx(1.5)
    assert summary["output_tok_per_s"] == pytest.approx(10 / 1.5)
    assert summary["max_concurrency"] == 2
    # Ten tokens came in so many pieces.
    assert (summary["output_tokens"], summary["num_events"]) == (10, 6)
    assert summary["mean_concurrency"] == pytest.approx(2 / 1.5)
    assert summary["errors"] == ["HTTP 503"]
    # 200 ms a token is over the limit.
    assert summary["good_share"] == 0.0
    text = "\n".join(summary_lines(summary))
    assert "2 completed, 1 failed" in text
    assert "TTFT" in text


def test_requests_that_follow_each_other_do_not_overlap() -> None:
    summary = summarize([record(0, 10.0), record(1, 11.0)])
    assert summary["max_concurrency"] == 1


def test_objectives_may_be_named_one_by_one() -> None:
    one = record()
    assert meets(one, {"ttft": 201})
    assert not meets(one, {"ttft": 201, "e2e": 900})
