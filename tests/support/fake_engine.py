"""An engine without a model: the real client, and a scheduler that answers with a function.

A token is a byte: its id is the value of the byte. Special tokens have larger ids. So tests can
count tokens by hand, and this module needs no torch.
"""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from runtime.checkpoint.rope_json import RopeConfig
from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.extras.logprobs.positions import LogprobArrays, LogprobSpec
from runtime.ipc.messages import (
    AbortAll,
    AbortRequests,
    BeginTimes,
    FinishReason,
    GenerateRequest,
    SchedulerInbound,
    TextDelta,
    TextDeltas,
)
from runtime.models.decoder.spec import DecoderSpec
from runtime.requests.extra_spec import ExtraBlock
from runtime.text.tokenizer import Tokenizer

IM_START, IM_END, BOS = "<|im_start|>", "<|im_end|>", "<s>"
SPECIALS = (BOS, IM_START, IM_END)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 320
EOS_ID = 258

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, more_special: Iterable[str] = ()
) -> Tokenizer:
    """Return a tokenizer: a token for each byte, then `SPECIALS`, `PLAIN` and `more_special`."""
    alphabet = byte_alphabet()
    backend = Backend(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    backend.add_special_tokens([AddedToken(text, special=True) for text in more_special])
    return Tokenizer(backend, {"eos_token": IM_END, "bos_token": BOS}, chat_template)


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {}, 256
    for byte in range(256):
        if byte in printable:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(extra)
            extra += 1
    return [names[byte] for byte in range(256)]


def fake_model_config(**changes: Any) -> DecoderSpec:
    """Return the spec of a model that is never built."""
    values: dict[str, Any] = {
        "architecture": "FakeForCausalLM",
        "model_type": "fake",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "context_len": 4096,
        "tie_word_embeddings": True,
        "eos_token_ids": (EOS_ID,),
    }
    return DecoderSpec(**{**values, **changes})


def echo(prompt: str) -> str:
    """Return the last user message of a prompt; the whole prompt if it has no messages."""
    _, found, turn = prompt.rpartition(f"{IM_START}user\n")
    return turn.partition(IM_END)[0] if found else prompt


class FakeEngine:
    """Answers each request with `reply(prompt)`, `step_tokens` tokens per step.

    Attributes:
        requests: all requests that the scheduler received.
        aborted: ids of aborted requests.
        hold: a request whose prompt contains this text generates nothing until it is aborted.
    """

    def __init__(
        self,
        reply: Callable[[str], str] = echo,
        *,
        tokenizer: Tokenizer | None = None,
        context_len: int = 4096,
        step_s: float = 0.0,
        hold: str = "\0",
        dp_size: int = 1,
        step_tokens: int = 1,
    ) -> None:
        """Create a client that is ready for requests."""
        self.reply = reply
        self.tokenizer = tokenizer or byte_tokenizer()
        limits = EngineLimits(context_len, context_len * 4, VOCAB_SIZE)
        self.client = EngineClient(limits, 0, dp_size=dp_size)
        for link in self.client.links:
            link.connect(self._receive)
        self.client.ready = True
        self.requests: list[GenerateRequest] = []
        self.aborted: set[int] = set()
        self._scored: set[int] = set()
        self.refuse: FinishReason | None = None
        self.fail_after: int | None = None
        self.hold = hold
        self._step_s = step_s
        self._step_tokens = step_tokens
        self._abort_seen = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def _receive(self, message: SchedulerInbound) -> None:
        if isinstance(message, GenerateRequest):
            self.requests.append(message)
            self._spawn(self._serve(message))
        elif isinstance(message, AbortRequests):
            self._abort(message.request_ids)
        elif isinstance(message, AbortAll):
            self._abort([request.request_id for request in self.requests])

    def _abort(self, request_ids: list[int]) -> None:
        self.aborted.update(request_ids)
        self._spawn(self._tell_aborted())

    async def _tell_aborted(self) -> None:
        async with self._abort_seen:
            self._abort_seen.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _logprobs(self, request: GenerateRequest, ids: list[int]) -> list[ExtraBlock] | None:
        """Return log-probabilities: -0.5 for each token, and -1, -2, -3, ... for a, b, c, ..."""
        if not request.spec.extras:
            return None
        (extra,) = request.spec.extras
        spec = LogprobSpec.of(extra.params)
        blocks = [self._block(request, spec, False, len(ids))]
        if request.request_id not in self._scored and spec.start_len >= 0:
            num_prompt = len(request.input_ids) // 4
            num_inputs = max(num_prompt - 1 - spec.start_len, 0)
            blocks.append(self._block(request, spec, True, num_inputs))
        self._scored.add(request.request_id)
        return blocks

    @staticmethod
    def _block(request: GenerateRequest, spec: LogprobSpec, is_input: bool, num: int) -> ExtraBlock:
        top = range(spec.top_num)
        arrays = LogprobArrays(
            array.array("f", [-0.5] * num).tobytes(),
            array.array("f", [-1.0 - each for each in top] * num).tobytes(),
            array.array("i", [97 + each for each in top] * num).tobytes(),
            array.array("f", [-9.0] * len(spec.token_ids) * num).tobytes(),
        )
        return ExtraBlock(request.request_id, "logprobs", is_input, arrays.encode())

    async def _serve(self, request: GenerateRequest) -> None:
        ids = list(memoryview(request.input_ids).cast("i"))
        prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
        if self.refuse is not None:
            self._send(request, "", [], self.refuse)
            return
        if self.hold in prompt:
            async with self._abort_seen:
                await self._abort_seen.wait_for(lambda: request.request_id in self.aborted)
        whole: list[str] = []
        whole_ids: list[int] = []
        steps, reason = self._steps(request, self.reply(prompt))
        if self._step_tokens > 1:
            # Several tokens may arrive at once, as with speculative decoding.
            groups = [
                steps[at : at + self._step_tokens] for at in range(0, len(steps), self._step_tokens)
            ]
            steps = [
                ("".join(text for text, _ in group), [i for _, ids in group for i in ids])
                for group in groups
            ]
        for at, (text, token_ids) in enumerate(steps):
            if request.request_id in self.aborted:
                reason = FinishReason("abort")
                break
            if self.fail_after == at:
                self.client.fail_all("The worker died while the request was in flight.")
                return
            if request.spec.stream:
                self._send(request, text, token_ids, None)
                await asyncio.sleep(self._step_s)
            else:
                whole.append(text)
                whole_ids += token_ids
        self._send(request, "".join(whole), whole_ids, reason)

    def _steps(
        self, request: GenerateRequest, text: str
    ) -> tuple[list[tuple[str, list[int]]], FinishReason]:
        """Return the steps of the reply, cut at a stop string or at the token limit."""
        sampling = request.spec.sampling
        reason = FinishReason("stop", matched=EOS_ID)
        ends = True
        for stop in sampling.stop:
            if stop in text:
                text = text.partition(stop)[0]
                reason = FinishReason("stop", matched=stop)
                ends = False
        steps: list[tuple[str, list[int]]] = [
            (piece, [token_id]) for token_id, piece in self._pieces(text)
        ]
        if ends and not sampling.ignore_eos:
            steps.append(("", [EOS_ID]))
        limit = sampling.max_new_tokens
        assert limit is not None
        if len(steps) > limit:
            return steps[:limit], FinishReason("length", length=limit)
        return steps, reason

    def _pieces(self, text: str) -> list[tuple[int, str]]:
        # The text of a character comes with its last byte, as from the detokenizer.
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        pieces, held = [], bytearray()
        for token_id in ids:
            if token_id >= 256:
                pieces.append((token_id, self.tokenizer.decode([token_id], False)))
                continue
            held.append(token_id)
            try:
                pieces.append((token_id, held.decode()))
                held.clear()
            except UnicodeDecodeError:
                pieces.append((token_id, ""))
        return pieces

    def _send(
        self,
        request: GenerateRequest,
        text: str,
        token_ids: list[int],
        reason: FinishReason | None,
    ) -> None:
        data = array.array("i", token_ids).tobytes()
        delta = TextDelta(
            request.request_id,
            text,
            data,
            reason,
            cached_tokens=3,
            extras=self._logprobs(request, token_ids),
            times=BeginTimes(request.arrival, time.monotonic()),
        )
        self.client.on_deltas(TextDeltas([delta]))
