"""Clients that come and go, and the outcome of each request, for `benchmarks.mixed_load`."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image, ImageDraw

from benchmarks.wire_streams import Reading, Stream, first_difference, is_beginning, read, streams

_TIMEOUT_S = 120.0
# The most requests that one client sends before it disconnects.
_MOST_REQUESTS = 12
_THINKING_S = 0.6
_SLOW_S = 0.05
# A client whose request was refused waits this long, as the header `Retry-After` asks.
_REFUSED_S = 1.0
_LEAVES_WITHIN_S = 0.6
# A client may notice the end of a process this many seconds late.
_NOTICE_S = 2.0
# The server is not ready without these processes; other processes are started again with their next
# job.
KEPT_RUNNING = ("front", "worker", "detokenizer")
ANSWERED_400 = "refused with 400, as it must be"
ANSWERED_503 = "refused with 503 while no worker was ready"
ANSWERED_BUSY = "refused with 503, as a compiling grammar got no processor"
_TOO_BUSY = "The machine was too busy to compile"
FRONT_AWAY = "cut off, or no connection, while the front was away"
_HOW = ("read",) * 13 + ("slow",) * 2 + ("leave",) * 2 + ("abort",) * 2 + ("bad",)
_BAD: Sequence[tuple[str, dict[str, Any]]] = (
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("/generate", {"input_ids": [1, 2, 10**6]}),
    ("/generate", {"text": "word " * 5000}),
    ("/generate", {"text": "x", "sampling_params": {"regex": "(a+"}}),
    ("/v1/chat/completions", {"model": "default", "messages": []}),
    ("/v1/messages", {"model": "default", "messages": [{"role": "user", "content": "x"}]}),
    ("/api/chat", {"model": "default", "messages": [{"role": "nobody", "content": "x"}]}),
)


def requests(num_tokens: int, *, sees: bool, adapters: Sequence[str]) -> list[Stream]:
    """Return requests for all APIs, each with a different answer.

    Args:
        num_tokens: most tokens of an answer.
        sees: whether the model takes images.
        adapters: names of the server's adapters (LoRA).
    """
    found = streams(48, num_tokens, has_grammars=True)
    # The same APIs, with answers that are not streamed.
    found += [_answered_whole(each) for each in streams(24, num_tokens, has_grammars=True)]
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    for index, name in enumerate(adapters):
        text = f"{index} The stones grind the grain"
        native = {"text": text, "lora_path": name, "sampling_params": sampling}
        chat = {"model": name, "messages": [{"role": "user", "content": text}]}
        found += [
            Stream("/generate", {**native, "stream": True}),
            Stream("/v1/chat/completions", {**chat, "max_tokens": num_tokens, "stream": True}),
            Stream("/v1/messages", {**chat, "max_tokens": num_tokens, "temperature": 0}),
        ]
    found.append(Stream("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1, 2]}))
    if sees:
        found += _about_pictures(num_tokens)
    return found


def _answered_whole(stream: Stream) -> Stream:
    body = {key: each for key, each in stream.body.items() if key != "stream_options"}
    return Stream(stream.path, {**body, "stream": False})


def _about_pictures(num_tokens: int) -> list[Stream]:
    found = []
    for index, colour in enumerate(("red", "blue", "green", "orange")):
        encoded = _picture(index, colour)
        url = f"data:image/png;base64,{encoded}"
        question = "What is in the image?"
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ]
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": question}]
        common = {"model": "default", "max_tokens": num_tokens, "temperature": 0}
        said = {"role": "user", "content": question, "images": [encoded]}
        options = {"num_predict": num_tokens, "temperature": 0}
        found += [
            Stream(
                "/v1/chat/completions",
                {**common, "stream": True, "messages": [{"role": "user", "content": parts}]},
            ),
            Stream("/v1/messages", {**common, "messages": [{"role": "user", "content": blocks}]}),
            Stream("/api/chat", {"model": "default", "messages": [said], "options": options}),
        ]
    return found


def _picture(index: int, colour: str) -> str:
    image = Image.new("RGB", (160, 120), "white")
    left = 20 + 12 * index
    drawing = ImageDraw.Draw(image)
    if index % 2:
        drawing.ellipse((left, 30, left + 50, 80), fill=colour)
    else:
        drawing.rectangle((left, 30, left + 50, 80), fill=colour)
    target = io.BytesIO()
    image.save(target, "PNG")
    return base64.b64encode(target.getvalue()).decode()


@dataclass
class Kill:
    """One process that was killed.

    Attributes:
        kind: kind of the process: `front`, `worker`, ...
        at: time of the kill, by `time.monotonic()`.
        ready_at: time when the server was ready again; infinite until then.
    """

    kind: str
    at: float
    ready_at: float = float("inf")


@dataclass
class Outcomes:
    """The outcomes of all requests.

    Attributes:
        counts: number of requests by outcome.
        times: `time.monotonic()` and outcome of each request.
        wrong: descriptions of all errors.
        num_events: number of stream events that were read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    times: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_events: int = 0

    def note(self, outcome: str, wrong: str = "") -> None:
        """Count one request; `wrong` describes its error, if there was one."""
        self.counts[outcome] += 1
        self.times.append((time.monotonic(), outcome))
        if wrong:
            self.wrong.append(wrong)

    def note_failure(
        self, begin: float, reading: Reading, what: str, kills: Sequence[Kill]
    ) -> None:
        """Count a request that failed; without a kill at about that time, it is an error."""
        now = time.monotonic()
        beside = [kill for kill in kills if kill.at <= now and begin <= kill.ready_at + _NOTICE_S]
        if reading.is_broken and any(kill.kind == "front" for kill in beside):
            self.note(FRONT_AWAY)
        elif reading.status == 503 and _TOO_BUSY in reading.error:
            self.note(ANSWERED_BUSY)
        elif reading.status == 503 and any(kill.kind in KEPT_RUNNING for kill in beside):
            self.note(ANSWERED_503)
        else:
            self.note("wrong", f"{what}: {reading.error}")


class Traffic:
    """Clients that each send random requests out of a list.

    Attributes:
        outcomes: the outcomes so far.
        kills: kills of the server's processes, which the killer appends.
    """

    def __init__(self, url: str, wanted: Sequence[Stream], seed: int) -> None:
        """Prepare to send the requests `wanted` to the server at `url`."""
        self._url = url
        self._wanted = wanted
        self._rng = random.Random(seed)
        self._undisturbed: list[Reading] = []
        self.outcomes = Outcomes()
        self.kills: list[Kill] = []

    async def learn(self, num_clients: int) -> None:
        """Read each answer once while nothing is killed, to know the right answers."""
        self._undisturbed = [Reading() for _ in self._wanted]
        left = list(zip(self._wanted, self._undisturbed, strict=True))

        async def one() -> None:
            async with self._client() as client:
                while left:
                    stream, reading = left.pop()
                    await read(client, stream, reading)
                    if _TOO_BUSY in reading.error:
                        vars(reading).update(vars(Reading()))
                        left.insert(0, (stream, reading))

        await asyncio.gather(*(one() for _ in range(num_clients)))
        failed = [each.error for each in self._undisturbed if each.error]
        assert not failed, failed

    def _client(self) -> httpx.AsyncClient:
        # TLS certificates are not loaded, because loading them takes longer than most requests.
        return httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, verify=False)

    async def come_and_go(self, number: int, until: float) -> None:
        """Run one client after another until the time `until`; each opens its own connections."""
        count = 0
        while time.monotonic() < until:
            async with self._client() as client:
                for _ in range(self._rng.randint(1, _MOST_REQUESTS)):
                    if time.monotonic() >= until:
                        return
                    count += 1
                    is_answered = await self._send(client, f"{number}-{count}")
                    pause_s = self._rng.random() * _THINKING_S
                    await asyncio.sleep(pause_s if is_answered else _REFUSED_S)

    async def _send(self, client: httpx.AsyncClient, name: str) -> bool:
        """Send one request; return whether it was answered."""
        how = self._rng.choice(_HOW)
        begin = time.monotonic()
        if how == "bad":
            path, body = self._rng.choice(_BAD)
            reading = Reading()
            await read(client, Stream(path, body), reading)
            if reading.status == 400:
                self.outcomes.note(ANSWERED_400)
            else:
                self.outcomes.note_failure(begin, reading, f"no 400: {body}"[:200], self.kills)
            return reading.status == 400
        index = self._rng.randrange(len(self._wanted))
        stream, whole, reading = self._wanted[index], self._undisturbed[index], Reading()
        if how == "abort" and stream.path != "/generate":
            how = "leave"
        if how in ("leave", "abort"):
            await self._cut_short(client, how, name, stream, reading)
        else:
            await read(client, stream, reading, _SLOW_S if how == "slow" else 0.0)
        self.outcomes.num_events += len(reading.times)
        if reading.error:
            self.outcomes.note_failure(begin, reading, f"{stream.path}, {how}", self.kills)
        elif how in ("leave", "abort"):
            is_right = is_beginning(reading.merged, whole.merged)
            text = "" if is_right else f"{stream.path}, {how}: not the beginning"
            self.outcomes.note("aborted or left" if is_right else "wrong", text)
        elif difference := first_difference(whole.merged, reading.merged):
            self.outcomes.note("wrong", f"{stream.path}: {difference}")
        else:
            self.outcomes.note("as undisturbed")
        return not reading.error

    async def _cut_short(
        self, client: httpx.AsyncClient, how: str, name: str, stream: Stream, reading: Reading
    ) -> None:
        body = {**stream.body, "rid": name} if how == "abort" else stream.body
        call = asyncio.ensure_future(read(client, Stream(stream.path, body), reading))
        await asyncio.wait([call], timeout=self._rng.random() * _LEAVES_WITHIN_S)
        if how == "leave":
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return
        asking = Reading()
        await read(client, Stream("/abort_request", {"rid": name}), asking)
        await call
