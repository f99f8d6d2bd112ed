"""An engine in this process, without sockets: a real model with executor, scheduler and cache."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import zmq

from runtime.client.grammar_client import grammar_key
from runtime.config.options import WorkerConfig
from runtime.extras.hidden_states.front import ALL, LAST
from runtime.extras.logprobs.positions import LogprobSpec, PositionLogprobs, read_blocks
from runtime.grammar.grammar_backend import GrammarBackend
from runtime.grammar.libraries import open_libraries
from runtime.ipc.messages import (
    ControlReply,
    FinishReason,
    FrontInbound,
    GenerateRequest,
    TokenDeltas,
)
from runtime.ipc.shared_state import SharedState
from runtime.ipc.weight_messages import WeightCall, WeightOp
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.registry import read_model_spec
from runtime.requests.extra_spec import ExtraBlock, ExtraSpec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import GrammarSpec, SamplingParams
from runtime.worker.build_worker import build_grammars, build_rank, build_scheduler, read_spec
from runtime.worker.ranks import Ranks

Forward = Callable[[ForwardBatch], Any]
HiddenMode = Literal["", "last", "all"]

# The numerics tests also run on a GPU: HEADRACE_TEST_DEVICE=cuda make test ARGS=tests/numerics
DEVICE = os.environ.get("HEADRACE_TEST_DEVICE", "cpu")

# A seed that does not fit into 64 bits, so that the request fails when it takes a row. The front
# process would have refused it.
TOO_LARGE_SEED = 2**64


class InProcessEngine:
    """Runs requests to their end and collects their tokens."""

    def __init__(self, model_folder: Path, **options: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="engine-test-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        config = WorkerConfig(
            run_folder=str(folder),
            generation=0,
            model_folder=str(model_folder),
            load_format="auto",
            dtype="float32",
            device=DEVICE,
            context_len=256,
            eos_token_ids=list(read_model_spec(model_folder).eos_token_ids),
            random_seed=0,
            mem_fraction_static=None,
            max_total_tokens=16 * 256,
            max_running_requests=32,
            max_queued_requests=None,
            chunked_prefill_size=-1,
            schedule_policy="fcfs",
            page_size=16,
            disable_radix_cache=False,
            overlap=False,
            attention_backend="auto",
            num_threads=1,
            log_level="warning",
            decode_log_interval=1000,
            stream_interval=1,
            tokenizer_folder=str(model_folder),
        )
        self.hidden_size = read_model_spec(model_folder).hidden_size
        self.shared = SharedState(folder / "state", create=True)
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.retractions: dict[int, int] = {}
        self.inputs: dict[int, list[PositionLogprobs]] = {}
        self.outputs: dict[int, list[PositionLogprobs]] = {}
        self.hidden_inputs: dict[int, list[list[float]]] = {}
        self.hidden_outputs: dict[int, list[list[float]]] = {}
        # The blocks of extra outputs, by request and name of the output.
        self.blocks: dict[tuple[int, str], list[ExtraBlock]] = {}
        self.replies: list[ControlReply] = []
        # The most tokens of one request in one message so far.
        self.most_at_once = 0
        config = replace(config, **options)
        if config.tp_size > 1 and dist.is_initialized():
            # A process has one process group at a time, and an earlier test has left its group.
            dist.destroy_process_group()
        ranks = Ranks(zmq.Context(), config, print) if config.tp_size > 1 else None
        self.config = config
        if config.grammar_backend == "xgrammar":
            # This import comes first: a thread imports the package with placeholders while tests
            # import the real one.
            import transformers  # noqa: F401
        spec = read_spec(config)
        self.grammars = build_grammars(config, spec.vocab_size)
        self.executor = build_rank(config, spec, 0, lambda *_: None)
        self.scheduler, self.ready = build_scheduler(
            config,
            self.executor,
            self.grammars,
            self.shared,
            self._collect,
            self._keep_reply,
            ranks,
        )
        torch.set_num_threads(1)

    @property
    def runner(self) -> Any:
        """The runner of this process, without the wrapper that leads other ranks."""
        return self.executor.runner

    @property
    def model(self) -> Any:
        """The model of this process's runner."""
        return self.executor.model

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV cache is allocated."""
        return self.scheduler.can_compute

    @contextmanager
    def computing(self, compute: Callable[[Forward, ForwardBatch], Any]) -> Iterator[None]:
        """Replace the model's `forward` by `compute`, which gets the original and each batch."""
        model, forward = self.model, self.model.forward
        # Encoders are never recorded, and do not say so.
        recordable = getattr(model, "is_recordable", False)
        model.forward = lambda batch: compute(forward, batch)
        model.is_recordable = False
        try:
            yield
        finally:
            del model.forward
            model.is_recordable = recordable

    def _collect(self, message: TokenDeltas) -> None:
        for start, cached in zip(message.starts, message.cached_tokens, strict=True):
            self.tokens[start.request_id], self.cached[start.request_id] = [], cached
            self.inputs[start.request_id], self.outputs[start.request_id] = [], []
            self.hidden_inputs[start.request_id] = []
            self.hidden_outputs[start.request_id] = []
        for block in message.extras:
            self.blocks.setdefault((block.request_id, block.extra), []).append(block)
            if block.extra == "logprobs":
                positions = self.inputs if block.is_input else self.outputs
                positions[block.request_id] += read_blocks([block])
            elif block.extra == "hidden_states":
                rows = np.frombuffer(block.data, dtype=np.float32).reshape(-1, self.hidden_size)
                kept = self.hidden_inputs if block.is_input else self.hidden_outputs
                if block.replaces:
                    kept[block.request_id].clear()
                kept[block.request_id] += rows.tolist()
        ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        for request_id, count in zip(message.request_ids, message.token_counts, strict=True):
            self.tokens[request_id] += ids[:count]
            ids = ids[count:]
            self.most_at_once = max(self.most_at_once, count)
        for end in message.ends:
            self.reasons[end.request_id] = end.reason
            self.retractions[end.request_id] = end.num_retractions

    def _keep_reply(self, message: FrontInbound) -> None:
        if isinstance(message, ControlReply):
            self.replies.append(message)

    def ask(self, op: WeightOp, *, flush_cache: bool = False) -> ControlReply:
        """Run an operation on weights or memory between two steps, and return the reply."""
        self.scheduler.receive([WeightCall(len(self.replies), op, flush_cache)])
        return self.replies[-1]

    def compile(self, spec: GrammarSpec) -> tuple[bytes, bytes]:
        """Return the key and the compiled form of a grammar."""
        backend = _grammar_backend(
            self.config.grammar_backend,
            Path(self.config.tokenizer_folder),
            self.executor.model.spec.vocab_size,
            tuple(self.config.eos_token_ids),
        )
        return grammar_key(spec), backend.compile(spec)

    def add(
        self,
        request_id: int,
        prompt: list[int],
        max_new_tokens: int,
        logprobs: LogprobSpec | None = None,
        hidden_states: HiddenMode = "",
        input_embeds: bytes = b"",
        extras: Sequence[ExtraSpec] = (),
        **sampling: Any,
    ) -> None:
        values = {"temperature": 0.0, "seed": 1} | sampling
        images, adapter_id = values.pop("images", []), values.pop("adapter_id", 0)
        sent = values.pop("output_ids", None)
        spec, is_cached = values.pop("grammar", None), values.pop("grammar_is_cached", False)
        key, payload = (b"", b"") if spec is None else self.compile(spec)
        if is_cached:
            # As in the front process, a grammar that the worker has is not sent again.
            payload = b""
        asked = [*extras, *([] if logprobs is None else [logprobs.extra()])]
        if hidden_states:
            asked.append(ALL if hidden_states == "all" else LAST)
        self.scheduler.receive(
            [
                GenerateRequest(
                    request_id=request_id,
                    input_ids=np.array(prompt, dtype=np.int32).tobytes(),
                    spec=RequestSpec(
                        row=RowSpec(
                            sampling=SamplingParams(max_new_tokens=max_new_tokens, **values),
                            extras=asked,
                            adapter_id=adapter_id,
                        ),
                        input_embeds=input_embeds,
                        images=images,
                    ),
                    arrival=float(request_id),
                    grammar_key=key,
                    grammar=payload,
                    is_resumed=sent is not None,
                    output_ids=np.array(sent or [], dtype=np.int32).tobytes(),
                )
            ]
        )

    def run(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step()
        self.scheduler.rest()
        self.scheduler.check_when_idle()

    def generate(self, prompt: list[int], max_new_tokens: int, **sampling: Any) -> list[int]:
        request_id = max(self.tokens, default=0) + 1
        self.add(request_id, prompt, max_new_tokens, **sampling)
        self.run()
        return self.tokens[request_id]


@lru_cache
def _grammar_backend(
    name: str, tokenizer_folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarBackend[Any]:
    """Return the grammar compiler, which in a server is a separate process."""
    return open_libraries(name, tokenizer_folder, vocab_size, list(eos_token_ids))
