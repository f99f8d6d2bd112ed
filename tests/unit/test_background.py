"""Background tasks: they are kept running, and their failures are reported."""

from __future__ import annotations

import asyncio

import pytest

from runtime.eventloop.background import MAX_FAILURES, Background


async def test_work_without_an_end_goes_on_after_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[str] = []
    background = Background(failures.append)
    endings = iter([ValueError("planted"), None])
    is_running = asyncio.Event()

    async def work() -> None:
        for error in endings:
            if error is not None:
                raise error
            return
        is_running.set()
        await asyncio.Event().wait()

    background.keep(work, "Receiving")
    async with asyncio.timeout(20):
        await is_running.wait()
    assert not failures
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "Receiving failed" in caplog.text
    assert "planted" in caplog.text
    assert "Receiving has ended" in caplog.text
    await background.stop()


async def test_work_that_always_fails_is_given_up_and_told_of() -> None:
    failed = asyncio.get_running_loop().create_future()
    background = Background(failed.set_result)
    num_tries = 0

    async def work() -> None:
        nonlocal num_tries
        num_tries += 1
        raise ValueError("planted")

    background.keep(work, "Receiving")
    async with asyncio.timeout(20):
        assert "Receiving failed 5 times" in await failed
    assert num_tries == MAX_FAILURES
    await background.stop()


async def test_a_failure_of_work_that_has_an_end() -> None:
    failed = asyncio.get_running_loop().create_future()
    background = Background(failed.set_result)
    done = asyncio.Event()

    async def succeed() -> None:
        done.set()

    async def fail() -> None:
        await done.wait()
        raise ValueError("a secret")

    background.run(succeed(), "The first")
    background.run(fail(), "The restart")
    async with asyncio.timeout(20):
        assert await failed == "The restart failed: ValueError."
    await background.stop()


async def test_stopping_waits_until_all_have_ended() -> None:
    background = Background(pytest.fail)
    has_ended = False

    async def work() -> None:
        nonlocal has_ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            has_ended = True

    background.keep(work, "Receiving")
    await asyncio.sleep(0)
    await background.stop()
    assert has_ended
