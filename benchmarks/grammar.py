"""Throughput of masked decoding against free decoding, in one run, at the worker itself.

`python -m benchmarks.grammar [--batch 32] [--tokens 128] [--rounds 5]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from headrace.demo import MODEL_PATH
from runtime.sampling_params import GrammarSpec
from tests.support.engine import InProcessEngine

# Never ends by itself, so that both sides make the same number of tokens.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "value": {"type": "integer"}},
        "required": ["name", "value"],
    },
    "minItems": 1000,
}


def tokens_per_s(
    engine: InProcessEngine, first_id: int, batch: int, count: int, **kw: Any
) -> float:
    for index in range(batch):
        engine.add(first_id + index, [5 + index, 9, 11, 7], count, ignore_eos=True, **kw)
    # The prompts, and the loading of the grammar.
    while engine.scheduler._table.num_running < batch:
        engine.scheduler.step()
    engine.scheduler.step()
    made = sum(len(engine.tokens.get(first_id + index, ())) for index in range(batch))
    started = time.perf_counter()
    engine.run()
    took_s = time.perf_counter() - started
    total = sum(len(engine.tokens[first_id + index]) for index in range(batch))
    return (total - made) / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = InProcessEngine(
        Path(MODEL_PATH), grammar_backend="xgrammar", max_total_tokens=options.batch * 256
    )
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    free: list[float] = []
    masked: list[float] = []
    next_id = 1
    for turn in range(options.rounds + 1):
        for speeds, kw in ((free, {}), (masked, {"grammar": spec})):
            speed = tokens_per_s(engine, next_id, options.batch, options.tokens, **kw)
            next_id += options.batch
            # The first round warms up.
            if turn:
                speeds.append(speed)
    result = {
        "batch": options.batch,
        "tokens": options.tokens,
        "free_tokens_per_s": statistics.median(free),
        "masked_tokens_per_s": statistics.median(masked),
        "cost": 1 - statistics.median(masked) / statistics.median(free),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
