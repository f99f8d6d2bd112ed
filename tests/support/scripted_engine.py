"""A model that answers from a script, with the real scheduler, cache and detokenizer.

All parts are in one process and need no torch. The prefix cache has what a server's would have: the
position in the script is found from the tokens that are read back through the pages.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.cache.manager import CacheManager
from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.ipc.messages import (
    ControlReply,
    FrontInbound,
    GenerateRequest,
    RequestError,
    SchedulerInbound,
    TokenDeltas,
)
from runtime.ipc.shared_state import SharedState
from runtime.ipc.time_messages import RequestTimes
from runtime.scheduler.budget import TokenBudget
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import EOS_ID, VOCAB_SIZE, byte_tokenizer
from tests.support.hash_runner import HashRunner

PAGE = 16


class _ScriptRunner(HashRunner):
    """Samples the next token of the script whose prompt and output so far are the sequence."""

    def __init__(self, num_pages: int, max_rows: int, max_len: int) -> None:
        super().__init__(num_pages, PAGE, max_rows, max_len)
        self.scripts: dict[bytes, list[int]] = {}

    def sampled(self, sequence: np.ndarray) -> int:
        data = np.ascontiguousarray(sequence, dtype=np.int32).tobytes()
        for prompt, output in list(self.scripts.items()):
            done = (len(data) - len(prompt)) // 4
            said = array.array("i", output[: max(done, 0)]).tobytes()
            if 0 <= done < len(output) and data == prompt + said:
                if done + 1 == len(output):
                    del self.scripts[prompt]
                return output[done]
        raise AssertionError("the pages hold a sequence that was never requested")


class ScriptedEngine:
    """Answers each prompt with `reply(prompt)`. A token is a byte, as in `FakeEngine`.

    Attributes:
        prompts: texts of the requests' prompts, in the order of arrival.
        num_cached: for each request, number of prompt tokens that were in the prefix cache.
    """

    def __init__(
        self,
        folder: Path,
        reply: Callable[[str], str],
        *,
        tokenizer: Tokenizer | None = None,
        context_len: int = 65_536,
        num_pages: int = 8_192,
    ) -> None:
        """Start the engine; the scheduler's gauges are in `folder`."""
        self.reply = reply
        self.tokenizer = tokenizer or byte_tokenizer()
        self.prompts: list[str] = []
        self.num_cached: list[int] = []
        limits = EngineLimits(context_len, num_pages * PAGE, VOCAB_SIZE)
        self.client = EngineClient(limits, 0)
        self.cache = CacheManager(num_pages, PAGE)
        self._runner = _ScriptRunner(num_pages, 4, context_len)
        self._detokenizer = Detokenizer(self.tokenizer)
        self._stepping: asyncio.Task[None] | None = None
        self._scheduler = Scheduler(
            self._runner,
            self.cache,
            SchedulerStats(SharedState(folder / "state", create=True), 10**9),
            SchedulerOptions(
                max_running_requests=4,
                context_len=context_len,
                token_budget=TokenBudget(8192, 8192),
                eos_token_ids=[EOS_ID],
                stream_interval=8,
            ),
            send_tokens=self._decode,
            send_front=self._hear,
        )
        self.client.links[0].connect(self._receive)
        self.client.ready = True

    def _receive(self, message: SchedulerInbound) -> None:
        if isinstance(message, GenerateRequest):
            ids = list(memoryview(message.input_ids).cast("i"))
            prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            self.prompts.append(prompt)
            said = self.tokenizer.encode(self.reply(prompt), add_special_tokens=False)
            self._runner.scripts[message.input_ids] = [*said, EOS_ID]
        # The message is handled later, as if it came from a socket.
        asyncio.get_running_loop().call_soon(self._take, message)

    def _take(self, message: SchedulerInbound) -> None:
        self._scheduler.receive([message])
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._scheduler.has_work:
            self._scheduler.step()
            await asyncio.sleep(0)
        self._scheduler.rest()
        self._scheduler.check_when_idle()

    def _decode(self, message: TokenDeltas) -> None:
        self.num_cached += message.cached_tokens
        deltas, hit = self._detokenizer.step(message)
        if hit is not None:
            self._scheduler.receive([hit])
        self.client.on_deltas(deltas)

    def _hear(self, message: FrontInbound) -> None:
        if isinstance(message, ControlReply):
            self.client.calls.on_reply(0, message)
        elif isinstance(message, RequestError):
            self.client.on_request_error(message)
        elif isinstance(message, RequestTimes):
            self.client.history.on_times(message.ended)
