"""Measures how far our and llama.cpp's logits of GGUF files are from float32, and the perplexity.

    python -m benchmarks.gguf_accuracy [smollm2 gemma3 qwen2.5-coder] --llama-python VENV/bin/python

The files are those of `tools.real_models`. The text is the language reference in Python's standard
library (`pydoc_data.topics`), in windows of 512 tokens, each with a new context. Perplexity is over
all tokens of all windows (`--tokens`). Divergence (KL, in nats) and agreement of the most probable
token are over the first `--positions` tokens. They are measured against `transformers` in float32
with the numbers that the file's blocks represent.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gguf_cpu import llama_cpp
from headrace.bench.environment import describe_environment, write_json
from kernels.quantized_linear.cpu import dots_name
from runtime.text.tokenizer import Tokenizer
from tests.real.test_gguf_files import reference
from tests.support.driver import Driver, load
from tools.real_models import MODELS, path_of

WINDOW = 512


def windows(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return token ids of the text in windows, each with the tokenizer's beginning tokens."""
    start = tokenizer.encode("")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: num_tokens * 8], add_special_tokens=False)[:num_tokens]
    size = WINDOW - len(start)
    return [start + ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]


def negative_log_likelihood(logits: Tensor, ids: list[int]) -> float:
    """Return the sum over all tokens of a window except the first."""
    rows, wanted = logits[:-1].float(), torch.tensor(ids[1:])
    return float((rows.logsumexp(-1) - rows.gather(1, wanted[:, None])[:, 0]).double().sum())


def distance(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Return sums over positions: the divergence, and the number of equal most probable tokens."""
    first, second = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = (first.exp() * (first - second)).sum(-1)
    same = expected.argmax(-1) == found.argmax(-1)
    return float(divergence.double().sum()), float(same.sum())


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures of one file."""
    path, texts = path_of(name), windows(Tokenizer.from_folder(path_of(name)), options.tokens)
    model = load(path)
    count = sum(len(ids) - 1 for ids in texts)
    likelihood = {"headrace": 0.0, "llama.cpp": 0.0}
    apart = {"headrace": [0.0, 0.0], "llama.cpp": [0.0, 0.0]}
    seen = 0
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        llama_cpp(options.llama_python, path, options.threads, 1, WINDOW) as peer,
    ):
        for ids in texts:
            driver = Driver(model, num_pages=WINDOW // 16 + 2)
            found = {"headrace": driver.prefill(driver.start(ids))}
            peer.ask("logits", ids=ids, path=str(Path(folder) / "logits.npy"))
            found["llama.cpp"] = torch.from_numpy(np.load(Path(folder) / "logits.npy"))
            for side, logits in found.items():
                likelihood[side] += negative_log_likelihood(logits, ids)
            if seen < options.positions:
                with torch.inference_mode():
                    expected = reference(name)(torch.tensor([ids])).logits[0]
                seen += len(ids)
                for side, logits in found.items():
                    for i, value in enumerate(distance(expected, logits)):
                        apart[side][i] += value
    result: dict[str, Any] = {"file": path.name, "tokens": count, "positions": seen}
    for side, total in likelihood.items():
        result[side] = {
            "perplexity": round(math.exp(total / count), 4),
            "divergence": round(apart[side][0] / seen, 5),
            "agreement": round(apart[side][1] / seen, 4),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--positions", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.models:
        results.append(measure(name, options))
        print(results[-1], flush=True)
    if options.json:
        machine = {**describe_environment(), "products": dots_name()}
        write_json(options.json, {"machine": machine, "results": results})


if __name__ == "__main__":
    main()
