"""Measures the CPU time per streamed token, from the scheduler's message to the client's stream.

    python -m benchmarks.detokenizer [--tokenizer FOLDER] [--json out.json]

At each step of a batch, the detokenizer decodes the message, decodes the tokens and encodes its
answer. The front decodes this answer and passes each delta to its stream. Sockets and SSE are not
included. Figures are microseconds of process time per token by number of streams, the best of
`--repeat` runs.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import json
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import tokenizers

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput
from runtime.ipc.messages import (
    DetokenizerInbound,
    FrontInbound,
    StreamStart,
    TextDeltas,
    TokenDeltas,
)
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import CORPUS, KINDS

NUM_STEPS = 200
CASES: dict[str, dict[str, object]] = {
    "stream": {},
    "stream, 1 stop string": {"stop": ["\nHuman:!"]},
    "stream, 4 stop strings": {"stop": ["\nHuman:!", "</answer>", "###", "STOPPED"]},
    "not streamed": {"stream": False},
}


@dataclass
class Row:
    """One line of the table; times are in microseconds per token."""

    tokenizer: str
    decoder: str
    case: str
    num_streams: int
    detokenizer_us: float
    front_us: float


def start_of(request_id: int, changes: dict[str, object]) -> StreamStart:
    values: dict[str, object] = {
        "stream": True,
        "stop": [],
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "stream_interval": 1,
        "prompt_tail": b"",
    }
    return StreamStart(request_id=request_id, **{**values, **changes})  # type: ignore[arg-type]  # names are the struct's


def open_client(num_streams: int) -> tuple[EngineClient, list[int]]:
    limits = EngineLimits(context_len=10**6, max_total_num_tokens=10**9, vocab_size=10**6)
    client = EngineClient(limits)
    ids: list[int] = []
    client.links[0].connect(lambda message: ids.append(message.request_id))  # type: ignore[union-attr]
    client.ready = True
    for index in range(num_streams):
        client.generate(
            GenerationInput(
                [1],
                RequestSpec(
                    row=RowSpec(sampling=SamplingParams(max_new_tokens=NUM_STEPS + 1)),
                    rid=str(index),
                    stream=True,
                ),
            )
        )
    return client, ids


def measure(
    tokenizer: Tokenizer, num_streams: int, changes: dict[str, object]
) -> tuple[float, float]:
    detokenizer = Detokenizer(tokenizer)
    client, request_ids = open_client(num_streams)
    words = tokenizer.encode(" ".join(CORPUS), add_special_tokens=False)
    encode = msgspec.msgpack.Encoder().encode
    steps = []
    for step in range(NUM_STEPS + 1):
        row = [words[(step + 7 * n) % len(words)] for n in range(num_streams)]
        starts = [start_of(n, changes) for n in request_ids] if step == 0 else []
        ids = array.array("i", row).tobytes()
        steps.append(
            encode(TokenDeltas(starts, [0] * len(starts), request_ids, [1] * num_streams, ids, []))
        )
    decode: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(DetokenizerInbound)
    answers = []
    begin = 0.0
    for index, payload in enumerate(steps):
        if index == 1:
            begin = time.process_time()
        message = decode.decode(payload)
        assert isinstance(message, TokenDeltas)
        out, _ = detokenizer.step(message)
        answers.append(encode(out) if out.deltas else b"")
    detokenizer_s = time.process_time() - begin
    front: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(FrontInbound)
    begin = time.process_time()
    for payload in answers[1:]:
        if payload:
            answer = front.decode(payload)
            assert isinstance(answer, TextDeltas)
            client.on_deltas(answer)
    front_s = time.process_time() - begin
    num_tokens = NUM_STEPS * num_streams
    return detokenizer_s / num_tokens * 1e6, front_s / num_tokens * 1e6


async def run(folder: Path | None, repeat: int) -> list[Row]:
    loaded = (
        {folder.name: Tokenizer.from_folder(folder)}
        if folder is not None
        else {kind: Tokenizer(KINDS[kind](), {}) for kind in ("llama3", "llama2", "unigram")}
    )
    rows = []
    for name, tokenizer in loaded.items():
        kind = Detokenizer(tokenizer).decoder_kind
        for case, changes in CASES.items():
            for num_streams in (1, 64, 512):
                results = [measure(tokenizer, num_streams, changes) for _ in range(repeat)]
                best = [min(column) for column in zip(*results, strict=True)]
                rows.append(Row(name, kind, case, num_streams, best[0], best[1]))
    return rows


def machine() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "msgspec": msgspec.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="model folder; tiny tokenizers when absent")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = asyncio.run(run(args.tokenizer, args.repeat))
    print(
        f"{'tokenizer':12} {'decoder':8} {'case':24} {'streams':>7} {'detok us':>9} {'front us':>9}"
    )
    for row in rows:
        print(
            f"{row.tokenizer:12} {row.decoder:8} {row.case:24} {row.num_streams:7}"
            f" {row.detokenizer_us:9.2f} {row.front_us:9.2f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    main()
