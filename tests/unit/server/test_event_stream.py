"""Work ends when its client disconnects, and streams end whose client does not read."""

import asyncio
import gc

import pytest

from server.event_stream import ClientGone, EventStream, unless_disconnected


class Client:
    """The receiving end of a connection, until `leave`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self.gone.set()


class Work:
    """Never done; its clean-up takes a while."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cleaned_up = False

    async def run(self) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True


def others() -> set[asyncio.Task]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_the_result_of_work_that_ends_first():
    async def answer():
        await asyncio.sleep(0)
        return 7

    client = Client()
    assert await unless_disconnected(client.receive, answer()) == 7
    # Nobody listens to the connection any more.
    await asyncio.sleep(0)
    assert not others()
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("error", [TimeoutError("mine"), ValueError("mine")])
async def test_an_error_of_the_work_is_its_own(error):
    async def fail():
        raise error

    with pytest.raises(type(error), match="mine"):
        await unless_disconnected(Client().receive, fail())


async def test_work_ends_with_its_client():
    client, work = Client(), Work()
    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientGone):
        await unless_disconnected(client.receive, work.run())
    assert work.cleaned_up
    assert asyncio.current_task().cancelling() == 0


async def test_a_connection_that_fails_has_ended():
    async def receive():
        raise OSError("reset")

    work = Work()
    with pytest.raises(ClientGone):
        await unless_disconnected(receive, work.run())
    assert work.cleaned_up


async def test_whoever_is_cancelled_while_waiting_stays_cancelled():
    work = Work()
    task = asyncio.create_task(unless_disconnected(Client().receive, work.run()))
    await work.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.cleaned_up
    await asyncio.sleep(0)
    assert not others()


async def answer(stream: EventStream, send) -> None:
    await asyncio.wait_for(stream({}, Client().receive, send), 10)


async def test_a_client_that_takes_nothing_loses_its_stream():
    closed, ends, sent = [], [], []

    async def events():
        try:
            for number in range(100):
                yield b"%d" % number
        finally:
            closed.append(True)

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    await answer(EventStream(events(), lambda: ends.append(True), timeout_s=0.05), send)
    assert [message.get("body") for message in sent] == [None, b"0", b"1", b"2"]
    assert closed == ends == [True]
    assert not others()


async def test_a_stream_leaves_nothing_for_the_collector():
    async def events():
        yield b"x"

    async def send(message):
        pass

    async def stream() -> None:
        await EventStream(events(), lambda: None)({}, Client().receive, send)

    await stream()
    await asyncio.sleep(0)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(100):
            await stream()
        await asyncio.sleep(0)
        # Not one object a stream; other threads may leave some.
        assert gc.collect() < 100
    finally:
        gc.enable()
        gc.unfreeze()


async def test_waiting_for_events_is_not_the_clients_fault():
    sent = []

    async def events():
        for _ in range(3):
            await asyncio.sleep(0.12)
            yield b"x"

    async def send(message):
        sent.append(message)

    await answer(EventStream(events(), lambda: None, timeout_s=0.05), send)
    assert [message.get("body") for message in sent] == [None, b"x", b"x", b"x", b""]


async def test_a_slow_client_has_the_whole_time_for_each_event(monkeypatch):
    now_s, sent = 0.0, []
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)

    async def events():
        for _ in range(4):
            yield b"x"

    async def send(message):
        nonlocal now_s
        now_s += 0.75
        for _ in range(3):
            await asyncio.sleep(0)
        sent.append(message)

    # In all it takes longer than one may.
    await answer(EventStream(events(), lambda: None, timeout_s=1.0), send)
    assert len(sent) == 6
