"""Pools of threads for work that would block the event loop."""

import asyncio
import subprocess
import sys
import threading

import pytest

from runtime.errors import InvalidRequest, Overloaded
from runtime.eventloop.offload import OffloadPool


class Held:
    """A job that goes on until it is released; counts how many are at work."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self) -> str:
        self.begun.release()
        assert self.release.wait(60)
        return "done"

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire)


async def test_gives_the_result_and_the_error() -> None:
    pool = OffloadPool("sums", workers=2, max_queued=4, timeout_s=60)
    assert await pool.run(sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)
    # The work's own TimeoutError is not the pool's deadline.
    with pytest.raises(TimeoutError, match="mine"):
        await pool.run(_fail, TimeoutError("mine"))


def _fail(error: Exception) -> None:
    raise error


async def test_the_loop_goes_on_and_no_more_than_the_workers_work() -> None:
    pool = OffloadPool("sums", workers=2, max_queued=4, timeout_s=60)
    held = Held()
    tasks = [asyncio.create_task(pool.run(held)) for _ in range(5)]
    for _ in range(2):
        await held.until_begun()
    await asyncio.sleep(0.01)
    assert not held.begun.acquire(blocking=False)
    held.release.set()
    assert await asyncio.gather(*tasks) == ["done"] * 5


async def test_a_full_queue_refuses_at_once() -> None:
    pool = OffloadPool("sums", workers=1, max_queued=1, timeout_s=60)
    held = Held()
    running = asyncio.create_task(pool.run(held))
    await held.until_begun()
    waiting = asyncio.create_task(pool.run(held))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 are waiting"):
        await pool.run(held)
    held.release.set()
    await asyncio.gather(running, waiting)


async def test_work_that_takes_too_long_is_given_up_and_its_place_taken() -> None:
    pool = OffloadPool("sums", workers=1, max_queued=4, timeout_s=0.2)
    stuck = Held()
    with pytest.raises(InvalidRequest, match=r"sums .* longer than 0\.2 s"):
        await pool.run(stuck)
    assert await pool.run(sum, [1, 2]) == 3
    # A second stuck one takes the place too; then no third is made.
    with pytest.raises(InvalidRequest):
        await pool.run(stuck)
    with pytest.raises(Overloaded, match="busy with the sums"):
        await pool.run(sum, [1, 2])
    stuck.release.set()
    while True:
        try:
            assert await pool.run(sum, [1, 2]) == 3
            break
        except Overloaded:
            continue


async def test_a_caller_who_leaves_takes_a_queued_job_along() -> None:
    pool = OffloadPool("sums", workers=1, max_queued=2, timeout_s=60)
    held = Held()
    running = asyncio.create_task(pool.run(held))
    await held.until_begun()
    calls: list[int] = []
    leaving = asyncio.create_task(pool.run(calls.append, 1))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    held.release.set()
    await running
    await pool.run(calls.append, 2)
    assert calls == [2]


def test_the_interpreter_does_not_wait_for_a_thread() -> None:
    code = """
import asyncio, time
from runtime.eventloop.offload import OffloadPool
from runtime.errors import InvalidRequest
async def main():
    pool = OffloadPool("naps", workers=1, max_queued=1, timeout_s=0.1)
    try:
        await pool.run(time.sleep, 3600)
    except InvalidRequest:
        print("given up")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
