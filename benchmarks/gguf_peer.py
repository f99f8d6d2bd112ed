"""Runs llama.cpp on a GGUF file, for `benchmarks.gguf_cpu` and `benchmarks.gguf_accuracy`.

This module runs in a separate interpreter, which has `llama-cpp-python`. It answers lines of JSON
on standard input with lines of JSON on standard output. Only the low-level binding is used, so a
time is that of `llama_decode` and `llama_synchronize` alone, as in `llama-batched-bench`. It
includes neither Python nor the choice of the next token.

With LLAMA_EXTRA_BUFFERS=0 in the environment, llama.cpp uses neither AMX nor repacked weights. Some
virtual machines announce AMX, but its instructions end the process there.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as binding


class Model:
    """A GGUF file with one context for up to `sequences` sequences of `length` tokens."""

    def __init__(self, path: str, threads: int, sequences: int, length: int) -> None:
        started = time.perf_counter()
        self.silence = binding.llama_log_callback(lambda *_: None)
        binding.llama_log_set(self.silence, None)
        binding.llama_backend_init()
        params = binding.llama_model_default_params()
        params.use_extra_bufts = os.environ.get("LLAMA_EXTRA_BUFFERS") != "0"
        self.model = binding.llama_model_load_from_file(path.encode(), params)
        options = binding.llama_context_default_params()
        options.n_ctx, options.n_seq_max = sequences * length, sequences
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        self.context = binding.llama_init_from_model(self.model, options)
        vocab = binding.llama_model_get_vocab(self.model)
        self.vocab_size = binding.llama_vocab_n_tokens(vocab)
        self.batch = binding.llama_batch_init(512, 0, 1)
        self.decode([1], [0], [0], [True])
        self.forget()
        self.ready_s = time.perf_counter() - started

    def forget(self) -> None:
        binding.llama_memory_clear(binding.llama_get_memory(self.context), True)

    def decode(
        self, tokens: list[int], positions: list[int], sequences: list[int], wanted: list[bool]
    ) -> float:
        """Return the seconds of one call of `llama_decode`."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, positions[i]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[i]
            batch.logits[i] = wanted[i]
        started = time.perf_counter()
        status = binding.llama_decode(self.context, batch)
        binding.llama_synchronize(self.context)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return time.perf_counter() - started

    def logits(self, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of the last call's wanted tokens, `[rows, vocab_size]`, a view."""
        pointer = binding.llama_get_logits(self.context)
        return np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (rows, self.vocab_size)
        )

    def prompt(self, ids: list[int], sequence: int = 0) -> float:
        seconds = 0.0
        for at in range(0, len(ids), 512):
            part = ids[at : at + 512]
            wanted = [at + i == len(ids) - 1 for i in range(len(part))]
            positions = list(range(at, at + len(part)))
            seconds += self.decode(part, positions, [sequence] * len(part), wanted)
        return seconds

    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return output tokens per second after the first token of each sequence, greedy."""
        self.forget()
        tokens = []
        for sequence, ids in enumerate(prompts):
            self.prompt(ids, sequence)
            tokens.append(int(self.logits(1)[0].argmax()))
        seconds, sequences = 0.0, list(range(len(prompts)))
        for step in range(num_tokens - 1):
            positions = [len(ids) + step for ids in prompts]
            seconds += self.decode(tokens, positions, sequences, [True] * len(prompts))
            tokens = self.logits(len(prompts)).argmax(-1).tolist()
        return len(prompts) * (num_tokens - 1) / seconds

    def window(self, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of each of up to 512 tokens."""
        self.forget()
        self.decode(ids, list(range(len(ids))), [0] * len(ids), [True] * len(ids))
        return self.logits(len(ids))


def answer(model: Model, ask: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one question."""
    match ask["do"]:
        case "ready":
            info = binding.llama_print_system_info().decode()
            return {"ready_s": model.ready_s, "instructions": info}
        case "generate":
            return {"tokens_per_s": model.generate(ask["prompts"], ask["num_tokens"])}
        case "prompt":
            model.forget()
            return {"tokens_per_s": len(ask["ids"]) / model.prompt(ask["ids"])}
        case "logits":
            np.save(ask["path"], model.window(ask["ids"]))
            return {}
    raise ValueError(ask["do"])


def main() -> None:
    path, *numbers = sys.argv[1:]
    model = Model(path, *map(int, numbers))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(model, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
