"""Recorded sessions: from a server's request log to a simulation of a fleet."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet import VOCAB_SIZE, TracedSessions, measure
from benchmarks.session_trace import (
    BLOCK,
    TracedRequest,
    block_tokens,
    read_trace,
    record,
    write_trace,
)
from runtime.checkpoint.demo import TOY_FOLDER
from runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / "benchmarks" / "agents.jsonl.gz"


def test_a_request_log_becomes_a_trace(tmp_path: Path) -> None:
    """Eight agents talk to a server at once; the log does not say who sent what."""
    command = [sys.executable, "-m", "benchmarks.record_agents", "--pause", "0.01", "--turns", "2"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
    requests = record(done.stderr.splitlines(), Tokenizer.from_folder(TOY_FOLDER))
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, requests)
    sessions = read_trace(path)
    assert sorted(itertools.chain(*sessions), key=lambda each: each.timestamp) == requests
    assert [len(each) for each in sessions] == [2] * 8
    for first, second in sessions:
        assert first.input_length < second.input_length
        assert first.timestamp < second.timestamp
        assert len(first.hash_ids) == -(-first.input_length // BLOCK)
        whole = first.input_length // BLOCK
        assert second.hash_ids[: whole - 1] == first.hash_ids[: whole - 1]
    # Codex, in both forms, and OpenCode begin with the same system text; Claude Code does not.
    texts = [set(first.hash_ids) for first, _ in sessions]
    partners = [sum(bool(one & other) for other in texts) for one in texts]
    assert sorted(partners) == [2, 2, 6, 6, 6, 6, 6, 6]
    assert all(one != other for one, other in itertools.combinations(texts, 2))
    # Most agents send the answer back as it was, and the server can use its pages again.
    kept = [set(first.answer_hash_ids[:-1]) <= set(second.hash_ids) for first, second in sessions]
    assert sum(kept) >= 4


def test_a_trace_of_others_is_read(tmp_path: Path) -> None:
    """Without sessions, as in Mooncake's traces: each line is one."""
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}\n'
    path.write_text(2 * line)
    (first,), (second,) = read_trace(path)
    assert first == second
    assert (first.timestamp, first.hash_ids) == (3000, [0, 462])


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 3, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 4}\n')
    with pytest.raises(ValueError, match="line 2: "):
        read_trace(path)


def test_blocks_become_tokens() -> None:
    tokens = block_tokens(range(5000), BLOCK, VOCAB_SIZE).reshape(-1, BLOCK)
    assert len(np.unique(tokens, axis=0)) == 5000
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE


def shared(one: Any, other: Any) -> int:
    """Tokens with which both prompts begin."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def test_repetitions_share_what_the_sessions_of_the_trace_share() -> None:
    """Blocks 0 and 1 are the system text. A prompt and its answer end within a block."""
    ask: dict[str, Any] = {
        "output_length": 20,
        "hash_ids": [0, 1, 2],
        "answer_hash_ids": [3],
        "input_length": 40,
    }
    more: dict[str, Any] = {
        "output_length": 4,
        "hash_ids": [0, 1, 3, 4],
        "input_length": 64,
        "delay": 2000.0,
    }
    other: dict[str, Any] = {
        "output_length": 4,
        "hash_ids": [0, 1, 5],
        "input_length": 40,
        "timestamp": 500.0,
    }
    trace = [[TracedRequest(**ask), TracedRequest(**more)], [TracedRequest(**other)]]
    traced = TracedSessions(trace, num_versions=2, block=BLOCK)
    turns = [list(traced.turns(number)) for number in range(6)]
    first, second = turns[0]
    assert len(first.prompt) == 40
    assert first.pause_s == 2
    assert first.answer is not None
    # The second prompt begins with the first one, and with as much of its answer as it has kept.
    assert shared(np.concatenate([first.prompt, first.answer]), second.prompt) == 48
    assert [(turn.reusable, turn.num_output) for turn in turns[0]] == [(0, 20), (48, 4)]
    # Another session; another version of the system text; and the first version once more.
    for number, same in ((1, 32), (2, 0), (3, 0), (4, 32), (5, 32)):
        assert shared(first.prompt, turns[number][0].prompt) == same
    assert [turns[number][0].reusable for number in range(6)] == [0, 32, 0, 32, 32, 32]
    assert [traced.start_s(number, ramp_s=0) for number in range(4)] == [0, 0.5, 0, 0.5]


def test_the_recording_is_routed_over_a_fleet() -> None:
    """One replica with a large pool finds all that is reusable, the answers' tokens included."""
    few = {"replicas": 1, "num_sessions": 2, "ramp": 0.0, "pool_tokens": 100_000}
    options = argparse.Namespace(sessions=AGENTS, block_size=BLOCK, kinds=1, **few)
    found = measure("cache_aware", options)
    sessions = read_trace(AGENTS)[:2]
    requests = list(itertools.chain(*sessions))
    assert found["requests"] == len(requests) == 48
    assert found["prompt_tokens"] == sum(each.input_length for each in requests)
    assert found["cached"] > 0.9
    assert found["of_reusable"] == pytest.approx(1, abs=0.005)
