"""One replica's children: which are restarted, and which are not."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from runtime.config.options import ServerConfig
from runtime.ipc.messages import DetokenizerReady, Progress, WorkerReady
from runtime.ipc.shared_state import SharedState
from runtime.ipc.transport import Outbox, front_address
from runtime.launch.hardware import Hardware
from runtime.launch.resolve import Folders, resolve
from runtime.processes.replica import Replica
from runtime.processes.status import ReplicaStatus
from tests.support.fake_engine import FakeEngine, fake_model_config
from tests.support.fake_server import WORKER
from tests.support.waiting import until_in_loop

_pids = itertools.count(WORKER.pid)


class Process:
    """A child that lives until it dies or is stopped, which takes until it `may_end`."""

    def __init__(self, entry: str, exited: Callable[[Any, int], None]) -> None:
        self.entry, self.exited = entry, exited
        self.is_alive, self.pid, self.last_words = True, next(_pids), ""
        self.may_end, self.is_asked = threading.Event(), threading.Event()
        self.config: Any = None
        self.may_end.set()

    def stop(self) -> None:
        self.is_asked.set()
        assert self.may_end.wait(20)
        self.is_alive = False

    def die(self) -> None:
        self.is_alive = False
        self.exited(self, 1)


class Children(list[Process]):
    """Every child in the order of their start; before that `refusals` are raised."""

    def __init__(self, run_folder: Path) -> None:
        self.refusals: list[Exception] = []
        self._outbox = Outbox(zmq.Context.instance(), front_address(run_folder))
        self._said = itertools.count(1)

    def start(self, entry: str, config: Any, exited: Any, environment: Any, **_: Any) -> Process:
        if self.refusals:
            raise self.refusals.pop(0)
        self.append(Process(entry, exited))
        self[-1].config = config
        return self[-1]

    async def say(self, replica: Replica, *messages: msgspec.Struct) -> None:
        """Have the replica read what children say."""
        # A restart takes back the phase and how far it is, not this.
        progress = Progress("warming_up", detail=f"message {next(self._said)}")
        for message in (*messages, progress):
            self._outbox.send(message)
        await until_in_loop(lambda: replica.status.detail == progress.detail)


@pytest.fixture
def started(tmp_path: Path) -> Children:
    return Children(tmp_path)


@pytest.fixture
async def replica(tmp_path: Path, started: Children) -> AsyncIterator[Replica]:
    hardware = Hardware(num_gpus=0, torch_has_cuda=False, cpu_has_bf16=False, num_cores=1)
    folders = Folders(tmp_path, tmp_path, tmp_path)
    resolved = resolve(ServerConfig(), fake_model_config(), hardware, folders, seed=7)
    status = ReplicaStatus(shared=SharedState(tmp_path / "state", create=True))
    owner = SimpleNamespace(
        restarts=True,
        status=SimpleNamespace(has_started=True),
        changed=lambda: None,
        worker_died=lambda: None,
        ended=lambda why: pytest.fail(why),
    )
    replica = Replica(
        status,
        resolved.worker,
        resolved.detokenizer,
        FakeEngine().client,
        zmq.Context(),
        owner,
        start_child=started.start,
        restart_delays_s=(0.0, 0.01),
    )
    yield replica
    # A test that failed has not: open sockets would hold whoever collects the context.
    await replica.stop()


async def test_both_children_are_replaced_when_the_worker_dies(
    replica: Replica, started: Children
) -> None:
    replica.start()
    started[0].die()
    await until_in_loop(lambda: len(started) == 4)
    assert [child.entry for child in started] == ["scheduler", "detokenizer"] * 2
    assert [child.is_alive for child in started] == [False, False, True, True]
    await replica.stop()
    assert not any(child.is_alive for child in started)


async def test_a_worker_that_died_is_not_ready_though_it_said_so(
    replica: Replica, started: Children
) -> None:
    replica.start()
    worker, detokenizer = started
    await started.say(replica, DetokenizerReady(detokenizer.pid))
    assert replica.status.detokenizer_ready
    worker.die()
    await started.say(replica, _ready(worker))
    assert not replica.status.is_ready
    await until_in_loop(lambda: len(started) == 4)
    # What the dead ones said is read when the new ones run.
    await started.say(replica, DetokenizerReady(detokenizer.pid), _ready(worker))
    assert not replica.status.is_ready
    assert not replica.status.detokenizer_ready
    assert replica.status.worker is None
    _, _, worker, detokenizer = started
    await started.say(replica, DetokenizerReady(detokenizer.pid), _ready(worker))
    assert replica.status.is_ready
    await replica.stop()


async def _until_the_detokenizer_is_waited_for(replica: Replica, started: Children) -> Process:
    """The worker has died, and the old detokenizer takes its time to end; the new worker."""
    replica.start()
    worker, detokenizer = started
    detokenizer.may_end.clear()
    worker.die()
    await until_in_loop(lambda: len(started) == 3)
    return started[2]


async def test_restarts_that_interleave_leave_nobody_behind(
    replica: Replica, started: Children
) -> None:
    new_worker = await _until_the_detokenizer_is_waited_for(replica, started)
    new_worker.die()
    # Time for the second restart to go as far as it can, which is nowhere.
    await asyncio.sleep(0.2)
    started[1].may_end.set()
    await until_in_loop(lambda: [child.entry for child in started].count("scheduler") == 3)
    await until_in_loop(lambda: started[-1].entry == "detokenizer" and started[-1].is_alive)
    await until_in_loop(lambda: len(alive(started)) == 2)
    assert sorted(child.entry for child in alive(started)) == ["detokenizer", "scheduler"]
    await replica.stop()
    assert not alive(started)


async def test_both_children_that_die_together_are_replaced_once(
    replica: Replica, started: Children
) -> None:
    replica.start()
    worker, detokenizer = started
    detokenizer.die()
    worker.die()
    await until_in_loop(lambda: len(alive(started)) == 2)
    await until_in_loop(lambda: len(replica.pids()) == 2)
    assert sorted(child.entry for child in alive(started)) == ["detokenizer", "scheduler"]
    await replica.stop()
    assert not alive(started)


async def test_a_child_that_the_system_cannot_start_is_tried_again(
    replica: Replica, started: Children
) -> None:
    replica.start()
    started.refusals += [OSError(12, "no memory"), RuntimeError("no thread")]
    started[0].die()
    await until_in_loop(lambda: len(started) == 4)
    assert [child.entry for child in alive(started)] == ["scheduler", "detokenizer"]
    await replica.stop()


def alive(children: list[Process]) -> list[Process]:
    return [child for child in children if child.is_alive]


def _ready(worker: Process) -> WorkerReady:
    return msgspec.structs.replace(WORKER, pid=worker.pid)


async def test_a_stop_while_a_detokenizer_is_replaced_starts_no_other(
    replica: Replica, started: Children
) -> None:
    new_worker = await _until_the_detokenizer_is_waited_for(replica, started)
    new_worker.may_end.clear()
    stopping = asyncio.create_task(replica.stop())
    await until_in_loop(new_worker.is_asked.is_set)
    # While the new worker takes its time to end, the old detokenizer has ended.
    started[1].may_end.set()
    await until_in_loop(lambda: not started[1].is_alive)
    # The replica has had its turn since.
    await started.say(replica)
    new_worker.may_end.set()
    await stopping
    assert [child.entry for child in started] == ["scheduler", "detokenizer", "scheduler"]
    assert not any(child.is_alive for child in started)


async def _being_renewed(replica: Replica, started: Children) -> asyncio.Task[str]:
    """A replica that was ready; its new worker and detokenizer are started."""
    replica.start()
    worker, detokenizer = started
    await started.say(replica, DetokenizerReady(detokenizer.pid), _ready(worker))
    assert replica.status.is_ready
    renewal = asyncio.create_task(replica.renew(Path("/other")))
    await until_in_loop(lambda: len(started) == 4)
    assert not worker.is_alive
    assert started[2].config.weights_folder == "/other"
    assert not replica.status.is_ready
    return renewal


async def test_a_worker_is_replaced_on_purpose(replica: Replica, started: Children) -> None:
    renewal = await _being_renewed(replica, started)
    assert not renewal.done()
    await started.say(replica, DetokenizerReady(started[3].pid), _ready(started[2]))
    assert await renewal == ""
    assert replica.status.is_ready
    # It was no failure.
    assert (replica.status.num_restarts, replica.status.last_failure) == (0, None)


async def test_weights_that_cannot_serve_give_way_to_the_earlier_ones(
    replica: Replica, started: Children
) -> None:
    earlier = replica._worker_config.weights_folder
    renewal = await _being_renewed(replica, started)
    started[2].die()
    assert "scheduler process" in await renewal
    await until_in_loop(lambda: len(alive(started)) == 2 and started[-1].entry == "detokenizer")
    assert started[-2].config.weights_folder == earlier
    assert started[-2].config.generation == 2
    await started.say(replica, DetokenizerReady(started[-1].pid), _ready(started[-2]))
    assert replica.status.is_ready


async def test_only_a_ready_worker_is_replaced(replica: Replica, started: Children) -> None:
    replica.start()
    assert "not ready" in await replica.renew(None)
    assert len(started) == 2
