"""Compares the throughput of decoding with and without a grammar mask, in the worker.

`python -m benchmarks.grammar [--backend xgrammar] [--batch 32] [--tokens 128] [--rounds 15]`

Rounds alternate between the two, so that other load on the machine affects both. The cost is the
median over the rounds, in processor time and in wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.demo import MODEL_PATH
from runtime.requests.sampling_params import GrammarSpec
from tests.support.engine import InProcessEngine

# The grammar never ends early, so that both sides generate the same number of tokens.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "value": {"type": "integer"}},
        "required": ["name", "value"],
    },
    "minItems": 1000,
}


@dataclass
class Speed:
    """Tokens per second of one batch, by wall time and by this process's processor time."""

    tokens_per_s: float
    tokens_per_cpu_s: float


def measure(engine: InProcessEngine, first_id: int, batch: int, count: int, **kw: Any) -> Speed:
    for index in range(batch):
        engine.add(first_id + index, [5 + index, 9, 11, 7], count, ignore_eos=True, **kw)
    # These steps run the prefill and load the grammar.
    while engine.scheduler._table.num_running < batch:
        engine.scheduler.step()
    engine.scheduler.step()
    made = sum(len(engine.tokens.get(first_id + index, ())) for index in range(batch))
    started, cpu_started = time.perf_counter(), time.process_time()
    engine.run()
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    total = sum(len(engine.tokens[first_id + index]) for index in range(batch))
    return Speed((total - made) / took_s, (total - made) / cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="xgrammar", choices=["xgrammar", "llguidance"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = InProcessEngine(
        Path(MODEL_PATH), grammar_backend=options.backend, max_total_tokens=options.batch * 256
    )
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    free: list[Speed] = []
    masked: list[Speed] = []
    next_id = 1
    for turn in range(options.rounds + 1):
        for speeds, kw in ((free, {}), (masked, {"grammar": spec})):
            speed = measure(engine, next_id, options.batch, options.tokens, **kw)
            next_id += options.batch
            # The first round warms up.
            if turn:
                speeds.append(speed)
    pairs = list(zip(free, masked, strict=True))
    result = {
        "backend": options.backend,
        "batch": options.batch,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "free_tokens_per_s": statistics.median(each.tokens_per_s for each in free),
        "masked_tokens_per_s": statistics.median(each.tokens_per_s for each in masked),
        "cost": statistics.median(1 - b.tokens_per_s / a.tokens_per_s for a, b in pairs),
        "cost_in_cpu_time": statistics.median(
            1 - b.tokens_per_cpu_s / a.tokens_per_cpu_s for a, b in pairs
        ),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
