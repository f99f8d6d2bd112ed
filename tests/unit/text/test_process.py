"""The real process over real sockets."""

from __future__ import annotations

import array
import os
import queue
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zmq

from runtime.config.options import DetokenizerConfig
from runtime.ipc.messages import (
    DetokenizerReady,
    FinishReason,
    FrontInbound,
    ResetStreams,
    SchedulerInbound,
    StartupFailed,
    StopHit,
    StreamEnd,
    StreamStart,
    TextDeltas,
    TokenDeltas,
)
from runtime.ipc.process import Child
from runtime.ipc.shared_state import SHARED_STATE_FILE, SharedState
from runtime.ipc.transport import (
    Inbox,
    Outbox,
    create_run_folder,
    detokenizer_address,
    front_address,
    remove_run_folder,
    scheduler_address,
)
from runtime.text.tokenizer import Tokenizer
from tests.support.processes import alive
from tests.support.tiny_tokenizers import llama3, write_folder
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]


class Peers:
    """The front's and the scheduler's ends of the sockets, and the child between them."""

    def __init__(self, folder: Path) -> None:
        self.run_folder = create_run_folder()
        self.shared = SharedState(self.run_folder / SHARED_STATE_FILE, create=True)
        self.context = zmq.Context()
        self.front = Inbox(self.context, front_address(self.run_folder), FrontInbound)
        self.scheduler = Inbox(
            self.context, scheduler_address(self.run_folder, 3), SchedulerInbound
        )
        self.exits: queue.Queue[int] = queue.Queue()
        config = DetokenizerConfig(
            run_folder=str(self.run_folder),
            generation=2,
            scheduler_generation=3,
            tokenizer_folder=str(folder),
            log_level="info",
        )
        self.child = Child("detokenizer", config, lambda _, code: self.exits.put(code))
        self.to_child = Outbox(self.context, detokenizer_address(self.run_folder, 2))

    def receive(self, inbox):
        assert inbox.wait(20), "nothing came"
        return list(inbox.drain())

    def close(self):
        self.child.stop()
        self.context.destroy(0)
        self.shared.close()
        remove_run_folder(self.run_folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), llama3(), eos_token="</s>")


@pytest.fixture
def peers(folder):
    peers = Peers(folder)
    yield peers
    peers.close()


def tokens(request_id, ids, *, begins=False, stop=(), ends=None):
    begin = StreamStart(request_id, True, list(stop), True, True, False, 1, b"")
    return TokenDeltas(
        starts=[begin] if begins else [],
        cached_tokens=[0] if begins else [],
        request_ids=[request_id],
        token_counts=[len(ids)],
        token_ids=array.array("i", ids).tobytes(),
        ends=[StreamEnd(request_id, ends)] if ends else [],
    )


def test_its_heart_beats_while_nothing_comes(peers):
    assert peers.receive(peers.front) == [DetokenizerReady(peers.child.pid)]
    before = peers.shared["detokenizer_time"]
    assert before > 0
    until(lambda: peers.shared["detokenizer_time"] != before, what="it stands still")


def test_a_conversation_with_garbage_in_between(peers, folder):
    assert peers.receive(peers.front) == [DetokenizerReady(peers.child.pid)]
    ids = Tokenizer.from_folder(folder).encode("Hello STOP more", add_special_tokens=False)
    raw = peers.context.socket(zmq.PUSH)
    raw.connect(detokenizer_address(peers.run_folder, 2))
    for garbage in (b"", b"garbage", b"\xff" * 1000, b"\x91\xabTokenDeltas", os.urandom(5000)):
        raw.send(garbage)
    peers.to_child.send(TokenDeltas([], [], [1], [7], b"", []))
    text, begins = "", True
    for token_id in ids:
        peers.to_child.send(tokens(1, [token_id], begins=begins, stop=["STOP"]))
        begins = False
    reason = None
    while reason is None:
        for message in peers.receive(peers.front):
            assert isinstance(message, TextDeltas)
            for delta in message.deltas:
                text, reason = text + delta.text, delta.reason
    assert (text, reason) == ("Hello ", FinishReason("stop", matched="STOP"))
    assert peers.receive(peers.scheduler) == [StopHit([1])]

    # After a reset the old stream is unknown, a new one works.
    peers.to_child.send(tokens(2, ids[:1], begins=True))
    peers.receive(peers.front)
    peers.to_child.send(ResetStreams())
    peers.to_child.send(tokens(2, ids[1:2]))
    peers.to_child.send(tokens(3, ids[:1], begins=True, ends=FinishReason("length", length=1)))
    (message,) = peers.receive(peers.front)
    assert [delta.request_id for delta in message.deltas] == [3]
    raw.close(0)


def test_it_leaves_when_its_stdin_closes(peers):
    peers.receive(peers.front)
    peers.child._process.stdin.close()
    assert peers.exits.get(timeout=60) == 0


def test_it_leaves_when_its_parent_is_killed(folder):
    code = textwrap.dedent(
        f"""
        import pathlib, sys, time
        from tests.unit.text.test_process import Peers
        peers = Peers(pathlib.Path({str(folder)!r}))
        peers.receive(peers.front)
        print(peers.child.pid, flush=True)
        time.sleep(60)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pid), what="the child outlived its parent")


def test_a_missing_tokenizer_is_reported(tmp_path):
    peers = Peers(tmp_path)
    (message,) = peers.receive(peers.front)
    assert isinstance(message, StartupFailed)
    assert "No tokenizer" in message.message
    assert peers.exits.get(timeout=60) == 1
    peers.close()
