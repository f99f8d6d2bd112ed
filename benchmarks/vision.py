"""Measures the cost of images: a second question about an image, and the effect on text streams.

    python -m benchmarks.vision --model-path demo-vision [--side 640] [--json FILE] [SERVER OPTIONS]

This starts `python -m server.launch`. First, while nothing else runs, each round asks two questions
about a new image; the figure is the seconds to the first token of each answer. Then 32 text streams
run without images, and again while 8 requests with new images arrive; the figure is the largest gap
between two tokens of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.h200.server_process import free_port, wait_ready
from headrace.bench.environment import describe_environment, write_json
from headrace.http_stream import HttpClient

QUESTIONS = ("What is in the image?", "How many squares are there?")
STREAMS, IMAGES = 32, 8
HEADERS = {"Content-Type": "application/json"}


def picture(rng: random.Random, side: int) -> str:
    """Return a new picture as a data URL; scaled noise compresses about as a photo does."""
    grain = Image.frombytes("RGB", (side // 8, side // 8), rng.randbytes(3 * (side // 8) ** 2))
    target = io.BytesIO()
    grain.resize((side, side), Image.Resampling.BICUBIC).save(target, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode()


def question(url: str, text: str, num_tokens: int) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def times(url: str, path: str, body: dict[str, Any]) -> list[float]:
    """Return the seconds from the request to each event, by this process's clock."""
    client = HttpClient(url, HEADERS, timeout_s=600.0)
    found: list[float] = []
    began = time.perf_counter()

    def note(_: float, data: bytes) -> None:
        if data != b"[DONE]":
            found.append(time.perf_counter() - began)

    try:
        await client.stream(path, json.dumps(body).encode(), note)
    finally:
        client.close()
    return found


async def first_tokens(url: str, rng: random.Random, options: Any) -> dict[str, Any]:
    """Measure the seconds to the first token for two questions about the same image."""
    rounds = []
    for _ in range(options.rounds + 1):
        image = picture(rng, options.side)
        # The first event holds the role, and arrives with the first token.
        rounds.append(
            [
                (await times(url, "/v1/chat/completions", question(image, text, 1)))[0]
                for text in QUESTIONS
            ]
        )
    # The first round starts the process that decodes images.
    firsts, seconds = zip(*rounds[1:], strict=True)
    return {
        "first_question_s": statistics.median(firsts),
        "second_question_s": statistics.median(seconds),
        "ratio": statistics.median(
            second / first for first, second in zip(firsts, seconds, strict=True)
        ),
        "rounds": options.rounds,
    }


async def largest_gap(url: str, rng: random.Random, options: Any, num_images: int) -> list[float]:
    """Return the largest gap between tokens of each text stream, in seconds, as images arrive."""
    # The pictures are encoded in advance, because this process cannot receive tokens while it
    # encodes.
    pictures = [picture(rng, options.side) for _ in range(num_images)]
    texts = []
    for _ in range(STREAMS):
        # The texts have no common prefix.
        words = " ".join(str(rng.randrange(10**6)) for _ in range(12))
        params = {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": words, "stream": True, "sampling_params": params}
        texts.append(asyncio.ensure_future(times(url, "/generate", body)))
    await asyncio.sleep(options.lead_s)
    images = [
        asyncio.ensure_future(times(url, "/v1/chat/completions", question(each, QUESTIONS[0], 8)))
        for each in pictures
    ]
    await asyncio.gather(*images)
    if images and any(each.done() for each in texts):
        raise SystemExit("A stream ended before the images were answered: raise --tokens.")
    found = []
    for stream in await asyncio.gather(*texts):
        # Gaps count only when all streams run, because the streams' own prefills are no disturbance
        # by images.
        late = [at for at in stream if at > options.lead_s / 2]
        found += [after - before for before, after in itertools.pairwise(late)]
    if not found:
        raise SystemExit("The streams ended before images came: raise --tokens.")
    return found


async def beside_streams(url: str, rng: random.Random, options: Any) -> dict[str, Any]:
    rows: dict[str, list[float]] = {"alone": [], "beside": []}
    typical = []
    for _ in range(options.rounds):
        # The two cases alternate, so that other load on the machine affects both.
        for name, num_images in (("alone", 0), ("beside", IMAGES)):
            gaps = await largest_gap(url, rng, options, num_images)
            rows[name].append(max(gaps))
            if not num_images:
                typical.append(statistics.median(gaps))
    alone, beside = statistics.median(rows["alone"]), statistics.median(rows["beside"])
    return {
        "streams": STREAMS,
        "images": IMAGES,
        "largest_gap_alone_s": alone,
        "largest_gap_beside_images_s": beside,
        "ratio": beside / alone,
        "usual_gap_alone_s": statistics.median(typical),
        "each_round": rows,
    }


async def run(options: argparse.Namespace, server: list[str]) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "server.launch", "--port", str(port), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(
        *command, "--model-path", options.model_path, *server
    )
    url, rng = f"http://127.0.0.1:{port}", random.Random(options.seed)
    try:
        await wait_ready(url, process)
        return {
            "same_picture": await first_tokens(url, rng, options),
            "beside_streams": await beside_streams(url, rng, options),
        }
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="demo-vision")
    parser.add_argument("--side", type=int, default=640, help="pixels of a picture's side")
    parser.add_argument("--tokens", type=int, default=900, help="of each text stream")
    parser.add_argument("--lead-s", type=float, default=1.0, help="of the streams before images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options, server = parser.parse_known_args()
    load = os.getloadavg()[0]
    result = asyncio.run(run(options, [each for each in server if each != "--"]))
    result["load_before"] = load
    if options.json:
        asked = {key: value for key, value in vars(options).items() if key != "json"}
        write_json(
            options.json, {"environment": describe_environment(), "options": asked, **result}
        )
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
