"""Measures the perplexity of real models in bfloat16, in fp8, and in fp8 with an fp8 KV cache.

    python -m benchmarks.fp8_accuracy [smollm2 qwen2.5-coder] [--device cpu] [--tokens 20000]

The weights are those of `tools.real_models`: the numbers that the blocks of a GGUF file represent
are written to a folder in bfloat16, and `--quantization fp8` quantizes them while they are loaded.
The text and its windows are those of `benchmarks.gguf_accuracy`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gguf_accuracy import windows
from headrace import Engine
from headrace.bench.environment import describe_environment, write_json
from runtime.text.tokenizer import Tokenizer
from tests.real.test_gguf_files import reference
from tools.real_models import path_of

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8"},
    "fp8, fp8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
# Windows of a call, which run in one batch.
_TOGETHER = 8


def perplexity(folder: Path, texts: list[list[int]], device: str, form: dict[str, Any]) -> float:
    """Return the perplexity of texts, over all tokens but the first of each."""
    total = 0.0
    with Engine(
        model_path=str(folder),
        dtype="bfloat16",
        device=device,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        **form,
    ) as engine:
        for first in range(0, len(texts), _TOGETHER):
            answers = engine.generate(
                input_ids=texts[first : first + _TOGETHER],
                sampling_params={"max_new_tokens": 1, "ignore_eos": True},
                return_logprob=True,
                logprob_start_len=0,
            )
            for answer in answers:
                rows = answer["meta_info"]["input_token_logprobs"]
                total -= sum(row[0] for row in rows if row[0] is not None)
    return math.exp(total / sum(len(ids) - 1 for ids in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2", "qwen2.5-coder"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.models:
        texts = windows(Tokenizer.from_folder(path_of(name)), options.tokens)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            reference(name).to(torch.bfloat16).save_pretrained(folder)
            for form, given in FORMS.items():
                found = perplexity(Path(folder), texts, options.device, given)
                results.append({"model": name, "form": form, "perplexity": round(found, 4)})
                print(results[-1], flush=True)
    if options.json:
        write_json(options.json, {"machine": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
