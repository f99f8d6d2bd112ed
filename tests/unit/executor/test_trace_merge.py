"""Traces of several ranks in one: no event is lost, and lanes and arrows of ranks are separate."""

import gzip
import json

from runtime.executor.profiler import merge, merge_when_written


def event(**fields):
    return {"ph": "X", "name": "aten::add", "ts": 1.5, "pid": 0, "tid": 7, **fields}


def write(path, events):
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file)


def test_lanes_and_arrows_of_ranks_stay_separate(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event(),
        event(pid="Spans"),
        event(ph="s", id=5),
        {"ph": "i", "name": "no process"},
    ]
    sources = [tmp_path / "a.gz", tmp_path / "b.gz"]
    for source in sources:
        write(source, events)
    merge(sources, tmp_path / "all.gz")
    with gzip.open(tmp_path / "all.gz", "rt") as file:
        trace = json.load(file)
    assert trace["schemaVersion"] == 1
    merged = trace["traceEvents"]
    assert len(merged) == 10
    assert {each["pid"] for each in merged if "pid" in each} == {
        *("TP-0 0", "TP-1 0", "TP-0 Spans", "TP-1 Spans"),
    }
    assert [each["args"]["name"] for each in merged if "args" in each] == [
        *("TP-0 python", "TP-1 python"),
    ]
    assert [each["id"] for each in merged if "id" in each] == [10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "all.gz", "b.gz"]


def test_a_file_that_is_not_a_trace_is_only_logged(tmp_path, caplog):
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    merge_when_written([tmp_path / "a.gz"], tmp_path / "all.gz").join(10)
    assert "could not be merged" in caplog.text
    assert not (tmp_path / "all.gz").exists()
