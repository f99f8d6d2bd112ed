"""Measures on a GPU how long pictures of new sizes delay the text streams that run meanwhile.

    python -m benchmarks.h200.images [--streams 32] [--sizes 12] [--json FILE]

This runs in the worker process itself, without HTTP, with the bundled vision model. Text streams
decode, and every few steps a request with a picture of a new size joins them. The output is the
longest step with and without pictures, in milliseconds. A step is the gap between two tokens of a
stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.environment import describe_environment, write_json
from runtime.models.registry import read_model_spec
from runtime.requests.image_input import ImageInput, PreparedImage
from tests.support.engine import InProcessEngine

MODEL = Path(__file__).resolve().parents[2] / "headrace" / "demo" / "vision"
STEPS_BETWEEN, ROUNDS = 24, 5


def picture(rows: int, columns: int, cell: int, seed: int) -> PreparedImage:
    """Return a picture of noise that has `rows * columns` vectors of `cell`² pixels."""
    size = (3, rows * cell, columns * cell)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    digest = blake2b(pixels.tobytes() + repr(size).encode(), digest_size=16).digest()
    return PreparedImage(digest, size, rows * columns, pixels.tobytes())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the longest steps of each round, without and with pictures."""
    engine = InProcessEngine(
        MODEL,
        device=options.device,
        dtype=options.dtype,
        context_len=2048,
        max_total_tokens=128 * 2048,
        max_running_requests=options.streams + 8,
        chunked_prefill_size=8192,
        overlap=options.device == "cuda",
    )
    vision = read_model_spec(MODEL).vision
    assert vision is not None, "the model sees"
    engine.runner.capture_graphs(lambda _: None)
    cell = vision.patch_size * vision.merge_size
    num_tokens = (2 * options.sizes + 4) * STEPS_BETWEEN
    rows: dict[str, list[float]] = {"alone": [], "beside": []}
    number = 0
    for turn in range(ROUNDS):
        for _ in range(options.streams):
            number += 1
            engine.add(number, [7 + number % 50] * 16, num_tokens, ignore_eos=True)
        for _ in range(STEPS_BETWEEN):
            engine.scheduler.step()
        for name in rows:
            longest = 0.0
            for index in range(options.sizes):
                if name == "beside":
                    number += 1
                    # Each picture has a different size.
                    image = picture(16 + index, 20 + turn, cell, number)
                    ids = [7, *[vision.image_token_id] * image.num_tokens, 8]
                    engine.add(number, ids, 4, images=[ImageInput(1, image)])
                for _ in range(STEPS_BETWEEN):
                    began = time.perf_counter()
                    engine.scheduler.step()
                    longest = max(longest, time.perf_counter() - began)
            rows[name].append(1e3 * longest)
        engine.run()
    alone, beside = statistics.median(rows["alone"]), statistics.median(rows["beside"])
    return {"alone_ms": alone, "beside_ms": beside, "ratio": beside / alone, "each_round": rows}


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--sizes", type=int, default=12, help="pictures of a round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        asked = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(
            options.json, {"environment": describe_environment(), "options": asked, **result}
        )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
