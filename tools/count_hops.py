"""`python -m tools.count_hops` lists and counts the functions on the path of a prompt and a token.

The tool starts a real server with the bundled tiny model, and follows one streamed request. The
worker and the detokenizer run on threads of this process, where a profile function can observe
them; they use their real sockets.

There are two journeys: of a prompt from the socket to the model, and of a token back to the client.
A journey is defined by its *stations*: the functions that receive the prompt or the token. When a
station is called, the call stack shows the path from the process's main loop to it. A **hop** is a
call on such a path that enters another module of ours. Calls of libraries do not count, and each
hop counts once. Functions of the front that have waited since the prompt arrived are not hops of a
token. A **climb** is a hop from a lower package to a higher one, by the order of imports in
`pyproject.toml`.

Some hops **hand on** the prompt or the token: they are still on the call stack when it goes
further. For a prompt, that is the moment when it goes to the next process, to the queue and to the
model. For a token, it is when the token goes to its request, to the next process, to its stream, to
the stream's reader and to uvicorn. The other hops are queries, which return before that.

The followed prompt is the second of two, so that work at first use is done before. The followed
token is the last one, because the first token takes another path, with the head of the answer.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
import tomllib
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import msgspec

ROOT = Path(__file__).resolve().parents[1]
OURS = ("kernels", "runtime", "openai_api", "anthropic_api", "ollama_api", "server", "headrace")
READY_TIMEOUT_S = 120.0
# The main loops of the processes, which are at the bottom of every call stack.
_LOOPS = (
    "server.front",
    "runtime.worker.worker_process",
    "runtime.text.detokenizer_process",
)

_SEND = "runtime.ipc.transport:Outbox.send"
_DRAIN = "runtime.ipc.transport:Inbox.drain"

# The stations of each journey, in call order; a station is a process and a function.
STATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "prompt": (
        ("front", "server.protocol:GuardedProtocol.data_received"),
        ("front", "runtime.eventloop.json_body:decode_body"),
        ("front", "runtime.text.encoding:TextEncoder.encode_batch"),
        ("front", "runtime.client.client:EngineClient.admit"),
        ("front", _SEND),
        ("worker", _DRAIN),
        ("worker", "runtime.scheduler.waiting:WaitingQueue.push"),
        ("worker", "runtime.cache.manager:CacheManager.allocate"),
        ("worker", "runtime.executor.build_batch:build_batch"),
        ("worker", "runtime.models.decoder.model:DecoderForCausalLM.forward"),
        ("worker", "runtime.models.attention.paged:PagedAttention.run"),
        ("worker", "kernels.paged_attention.cpu:paged_attention"),
    ),
    "token": (
        ("worker", "runtime.models.model:CausalLM.compute_logits"),
        ("worker", "runtime.executor.sampler:Sampler.sample"),
        ("worker", "runtime.scheduler.output:OutputProcessor.process"),
        ("worker", _SEND),
        ("detokenizer", _DRAIN),
        ("detokenizer", "runtime.text.detokenizer:Stream.advance"),
        ("detokenizer", _SEND),
        ("front", "runtime.ipc.transport:AsyncInbox.receive"),
        ("front", "runtime.client.client:EngineClient.on_deltas"),
        ("front", "runtime.client.generation_stream:GenerationStream.__anext__"),
        ("front", "runtime.service.generation:Output.answer"),
        ("front", "runtime.service.generation:event"),
        ("front", "server.entry.application:Application.__call__.send_with_id"),
    ),
}


# The stations that hand on the prompt or the token.
HAND_OVERS = {
    "prompt": (
        "server.protocol:GuardedProtocol.data_received",
        _SEND,
        "runtime.scheduler.waiting:WaitingQueue.push",
        "runtime.models.decoder.model:DecoderForCausalLM.forward",
    ),
    "token": (
        _SEND,
        "runtime.scheduler.output:OutputProcessor.process",
        "runtime.client.client:EngineClient.on_deltas",
        "runtime.client.generation_stream:GenerationStream.__anext__",
        "server.entry.application:Application.__call__.send_with_id",
    ),
}


@dataclass(frozen=True)
class Hop:
    """A call into another module of ours.

    Attributes:
        process: `front`, `worker` or `detokenizer`.
        function: `module:qualified.name`.
        caller: the calling module; empty if an event loop or the start of a thread is the caller.
        is_climb: whether the called package is above the caller's package.
        hands_on: whether the hop hands on the prompt or token; otherwise it is a query.
    """

    process: str
    function: str
    caller: str
    is_climb: bool
    hands_on: bool = True


def rooms_in_order() -> list[tuple[str, ...]]:
    """Return the packages, also those within `runtime`, from the top of the import order down."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    whole, inside = (c for c in tool["importlinter"]["contracts"] if c["type"] == "layers")
    rooms: list[tuple[str, ...]] = []
    for package in whole["layers"]:
        if [package] != inside["containers"]:
            rooms.append((package,))
            continue
        rooms += [
            tuple(f"{package}.{name.strip()}" for name in layer.split("|"))
            for layer in inside["layers"]
        ]
    return rooms


def height_of(module: str, rooms: Sequence[tuple[str, ...]]) -> int:
    """Return the index of a module's package in the import order, 0 at the bottom."""
    for height, names in enumerate(reversed(rooms)):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return height
    raise ValueError(f"{module} is in no room")


def hops_of(
    stacks: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    rooms: Sequence[tuple[str, ...]],
    before: Sequence[Hop] = (),
    hand_overs: Sequence[str] | None = None,
) -> list[Hop]:
    """Return the hops of a journey, in order.

    Args:
        stacks: for each call of a station its process, and the functions of ours on the call stack
            as (module, qualified name), the outermost first.
        rooms: the result of `rooms_in_order`.
        before: hops of the previous journey, whose functions in the front are still waiting.
        hand_overs: the stations that hand on; by default all of them.
    """
    handing = {
        (process, ":".join(call))
        for process, stack in stacks
        if hand_overs is None or ":".join(stack[-1]) in hand_overs
        for call in stack
    }
    hops: dict[tuple[str, str], Hop] = {}
    waiting = {hop.function for hop in before if hop.process == "front"}
    for process, stack in stacks:
        caller = ""
        for module, name in stack:
            function = f"{module}:{name}"
            if module != caller and not (process == "front" and function in waiting):
                is_climb = bool(caller) and height_of(module, rooms) > height_of(caller, rooms)
                hands_on = (process, function) in handing
                hop = Hop(process, function, caller, is_climb, hands_on)
                hops.setdefault((process, function), hop)
            caller = module
    return list(hops.values())


class Recorder:
    """A profile function that records the call stack of each call of a station.

    Attributes:
        is_on: whether calls are recorded.
        stacks: for each call the process and its stack, the outermost function first.
    """

    def __init__(self) -> None:
        """Register every station of every journey."""
        self.is_on = False
        self.stacks: list[tuple[str, list[tuple[str, str]]]] = []
        self._stations = {station for each in STATIONS.values() for station in each}
        self._names = {function.rpartition(".")[2] for _, function in self._stations}
        self._names |= {function.rpartition(":")[2] for _, function in self._stations}

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        """Handle one event; see `sys.setprofile`."""
        del argument
        if event != "call" or not self.is_on or frame.f_code.co_name not in self._names:
            return
        process = _process_of(threading.current_thread().name)
        module, name = _name_of(frame)
        if (process, f"{module}:{name}") not in self._stations:
            return
        stack: list[tuple[str, str]] = []
        outer: types.FrameType | None = frame
        while outer is not None:
            at = _name_of(outer)
            if at[0].partition(".")[0] in OURS and at[0] not in _LOOPS:
                stack.append(at)
            outer = outer.f_back
        self.stacks.append((process, stack[::-1]))

    def journey(self, name: str) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the stack of one call of each station of a journey, in the order of the stations.

        Raises:
            LookupError: a station was not called.
        """
        found = []
        for process, function in STATIONS[name]:
            calls = [
                each
                for each in self.stacks
                if (each[0], ":".join(each[1][-1])) == (process, function)
            ]
            if not calls:
                raise LookupError(f"{function} was not called in the {process}")
            found.append(calls[0 if name == "prompt" else -1])
        return found


def _name_of(frame: types.FrameType) -> tuple[str, str]:
    name = frame.f_code.co_qualname.replace("<locals>.", "")
    return str(frame.f_globals.get("__name__", "")), name


def _process_of(thread: str) -> str:
    return thread if thread in ("worker", "detokenizer") else "front"


class ThreadChild:
    """Replaces `runtime.ipc.process.Child`: runs a child process as a thread of this process."""

    profile: Callable[..., None]
    is_alive = True
    last_words = ""

    def __init__(self, entry: str, config: object, *_: object, **__: object) -> None:
        """Run the main function of the child process on a thread; it never returns."""
        from runtime.ipc.process import CHILD_ENTRIES

        self.entry = entry
        # The process id that the child reports is compared with this one.
        self.pid = os.getpid()
        payload = msgspec.msgpack.encode(config)
        main = CHILD_ENTRIES.load(entry)

        def run() -> None:
            sys.setprofile(type(self).profile)
            main(payload)

        name = "worker" if entry == "scheduler" else entry
        threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Do nothing: the thread ends with the process."""

    kill = stop


def follow(route: str, bodies: tuple[dict[str, Any], dict[str, Any]]) -> Recorder:
    """Serve the bundled tiny model, send two requests and record the path of the second.

    The server still runs afterwards, so the process must exit with `os._exit`.
    """
    # Imported before the profile function is set, which would slow these imports down.
    import runtime.worker.build_worker  # noqa: F401
    from runtime.processes.replica import Replica
    from server.front import run

    recorder = Recorder()
    port = _free_port()
    answered = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            _wait_ready(port)
            # The first request does all work that happens only at first use.
            _post(port, route, bodies[0])
            recorder.is_on = True
            _post(port, route, bodies[1])
        except BaseException as error:
            failures.append(error)
        finally:
            recorder.is_on = False
            answered.set()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, name="client", daemon=True).start()
    ThreadChild.profile = recorder
    in_threads = partial(Replica, start_child=cast("Any", ThreadChild))
    with mock.patch("runtime.processes.engine_processes.Replica", in_threads):
        sys.setprofile(recorder)
        arguments = ["--port", str(port), "--log-level", "error", "--skip-server-warmup"]
        arguments += ["--model-path", "demo-toy"]
        run([*arguments, "--grammar-backend", "none", "--device", "cpu"])
        sys.setprofile(None)
    if failures or not answered.is_set():
        raise RuntimeError("the request was not answered") from next(iter(failures), None)
    return recorder


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _post(port: int, route: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as response:
        answer: bytes = response.read()
        return answer


def body_of(place: str) -> dict[str, Any]:
    """Return the body of a streamed request about `place`, so that its prompt is unique."""
    return {
        "text": f"What is the capital of {place}?",
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "stream": True,
    }


def counts(hops: Sequence[Hop]) -> str:
    """Return a text with the number of hops, of climbs and of hops that hand on."""
    climbs, handing = sum(hop.is_climb for hop in hops), sum(hop.hands_on for hop in hops)
    return f"{len(hops)} hops, {climbs} climbs; {handing} hand on"


def to_text(name: str, hops: Sequence[Hop]) -> str:
    """Return the hops of a journey, one per line, and their number; `>` marks hops that hand on."""
    lines = [f"{name}: {counts(hops)}"]
    for number, hop in enumerate(hops, 1):
        climb = f"  <-- climbs from {hop.caller}" if hop.is_climb else ""
        sign = ">" if hop.hands_on else " "
        lines.append(f"{number:>4}  {hop.process:<12} {sign} {hop.function}{climb}")
    return "\n".join(lines)


# Matches an entry of the page that lists the journeys: a function and its description, which may
# take several lines.
ENTRY = re.compile(r"^- `([\w.]+:[\w.<>]+)`: (\S.*(?:\n +\S.*)*)$", re.MULTILINE)
PAGE_WIDTH = 120
# The prefix of the description of a hop that does not hand on.
ASKED = "asked: "
TITLES = {"prompt": "A prompt in", "token": "A token back"}


def renewed(page: str, journeys: Mapping[str, Sequence[Hop]]) -> str:
    """Return the text of the page with new lists of hops; descriptions of functions stay.

    A function that is new on the page is described by the first line of its docstring.

    Raises:
        LookupError: the page has no section for a journey.
    """
    for name, hops in journeys.items():
        head, title, rest = page.partition(f"\n## {TITLES[name]}\n")
        if not title:
            raise LookupError(f"the page has no section {TITLES[name]!r}")
        section, following, tail = rest.partition("\n## ")
        said: dict[tuple[str, str], str] = {}
        for part in section.split("\n### ")[1:]:
            process = part.partition("\n")[0].strip()
            said |= {
                (process, function): " ".join(text.split())
                for function, text in ENTRY.findall(part)
            }
        lines = ["", f"{counts(hops)}."]
        for before, hop in zip((None, *hops), hops, strict=False):
            if before is None or before.process != hop.process:
                lines += ["", f"### {hop.process}", ""]
            text = said.get((hop.process, hop.function)) or first_line_of(hop.function)
            text = text.partition(" (a climb, from")[0].removeprefix(ASKED)
            if not hop.hands_on:
                text = ASKED + text
            if hop.is_climb:
                text += f" (a climb, from `{hop.caller.partition('.')[0]}`)"
            lines += textwrap.wrap(
                f"- `{hop.function}`: {text}",
                PAGE_WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        page = "".join((head, title, "\n".join(lines), "\n", following, tail))
    return page


def first_line_of(function: str) -> str:
    """Return the first line of a function's docstring, without its capital and its full stop."""
    module, _, name = function.partition(":")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    line = (inspect.getdoc(found) or "").partition("\n")[0] if found is not None else ""
    return f"{line[:1].lower()}{line[1:].rstrip('.')}" or "says nothing of itself"


def main(argv: Sequence[str] | None = None) -> int:
    """Print both journeys, or renew the page that lists them."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.count_hops", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print the hops as JSON")
    parser.add_argument(
        "--renew", type=Path, metavar="PAGE", help="bring docs/where-am-i.md up to date"
    )
    options = parser.parse_args(argv)
    recorder = follow("/generate", (body_of("France"), body_of("Japan")))
    rooms = rooms_in_order()
    journeys: dict[str, list[Hop]] = {}
    for name in STATIONS:
        before = [hop for hops in journeys.values() for hop in hops]
        journeys[name] = hops_of(recorder.journey(name), rooms, before, HAND_OVERS[name])
    if options.renew is not None:
        page = renewed(options.renew.read_text(encoding="utf-8"), journeys)
        options.renew.write_text(page, encoding="utf-8")
    elif options.json:
        plain = {name: [asdict(hop) for hop in hops] for name, hops in journeys.items()}
        print(json.dumps(plain, indent=1))
    else:
        print("\n\n".join(to_text(name, hops) for name, hops in journeys.items()))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # `os._exit` is needed, because the threads of worker and detokenizer wait on sockets for ever.
    os._exit(status)
