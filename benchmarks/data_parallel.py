"""Measures what routing by cached prefix saves for conversations on an engine with replicas.

    python -m benchmarks.data_parallel [--dp-size 2] [--users 16] [--turns 4] [--json out.json]

Every user chats with the bundled demo model over several turns, with pauses between them. Each turn
sends the whole conversation plus new random ids. The report has the share of prompt tokens that
were found in a cache, the highest possible share (the pages of earlier turns), the share of
requests on the busiest replica, and the seconds of the whole run. Other load on the machine affects
the seconds, and slightly the shares: if answers take longer, a difference in load weighs more
against a prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import headrace
from headrace.bench.environment import describe_environment, write_json

METHODS = ("cache_aware", "total_requests", "round_robin")
PAGE_SIZE = 16
VOCAB_SIZE = 1000


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all conversations on a new engine with one method of routing."""
    draw = random.Random(0)
    rounds = [
        [
            [draw.randrange(VOCAB_SIZE) for _ in range(options.turn_len)]
            for _ in range(options.turns)
        ]
        for _ in range(options.users)
    ]
    sampling = {"max_new_tokens": options.output_len, "temperature": 0, "ignore_eos": True}
    metas: list[dict[str, Any]] = []
    most = 0

    async def talk(engine: headrace.Engine, turns: list[list[int]]) -> None:
        nonlocal most
        history: list[int] = []
        for turn in turns:
            await asyncio.sleep(draw.uniform(0.0, options.think))
            prompt = [*history, *turn]
            answer = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
            assert isinstance(answer, dict)
            metas.append(answer["meta_info"])
            # The last generated token is not in a cache.
            most += (len(history) - bool(history)) // PAGE_SIZE * PAGE_SIZE
            history = [*prompt, *answer["output_ids"]]

    async def run(engine: headrace.Engine) -> None:
        await asyncio.gather(*(talk(engine, turns) for turns in rounds))

    with headrace.Engine(
        dp_size=options.dp_size,
        load_balance_method=method,
        page_size=PAGE_SIZE,
        num_threads=1,
        random_seed=0,
    ) as engine:
        started = time.perf_counter()
        asyncio.run(run(engine))
        seconds = time.perf_counter() - started
    num_prompt = sum(meta["prompt_tokens"] for meta in metas)
    ranks = [meta["dp_rank"] for meta in metas]
    return {
        "method": method,
        "cached_share": round(sum(meta["cached_tokens"] for meta in metas) / num_prompt, 3),
        "most_share": round(most / num_prompt, 3),
        "busiest_share": round(max(map(ranks.count, set(ranks))) / len(ranks), 3),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-len", type=int, default=150)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--think", type=float, default=2.0, help="most seconds before a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(method, options) for method in METHODS]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if options.json is not None:
        chosen = {name: value for name, value in vars(options).items() if name != "json"}
        write_json(
            options.json,
            {"environment": describe_environment(), "options": chosen, "results": results},
        )


if __name__ == "__main__":
    main()
