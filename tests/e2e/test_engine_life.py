"""The offline engine's beginning and end: deaths, shutdowns, scripts, examples."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import headrace as sgl
from runtime.ipc.process import Child
from tests.support.offline import (
    FRANCE,
    LONG,
    MODEL,
    PLAIN,
    ROOT,
    SHORT,
    is_idle,
    run_script,
    slow_down,
)
from tests.support.processes import children, engine_processes
from tests.support.waiting import until

EXAMPLES = ROOT / "examples" / "engine"


def test_death_is_told_and_hurts_nobody_else():
    mine = subprocess.Popen(["sleep", "600"])
    other = sgl.Engine(**PLAIN)
    others = children(os.getpid())
    try:
        with sgl.Engine(model_path=MODEL) as doomed:
            pids = engine_processes(os.getpid(), besides=others)
            slow_down(doomed)
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(doomed.generate, FRANCE, LONG)
                until(lambda: not is_idle(doomed))
                os.kill(pids["scheduler"], signal.SIGKILL)
                with pytest.raises(sgl.EngineDeadError, match="SIGKILL"):
                    pending.result(60)
            for call in (lambda: doomed.generate(FRANCE), doomed.flush_cache):
                with pytest.raises(sgl.EngineDeadError, match="SIGKILL"):
                    call()
        assert other.generate(FRANCE, SHORT)["text"].startswith(" Paris")
        doomed.shutdown()
        with pytest.raises(sgl.EngineDeadError, match="shut down"):
            doomed.generate(FRANCE)
        with pytest.raises(sgl.EngineDeadError, match="shut down"):
            asyncio.run(doomed.async_generate(FRANCE))
        for pid in pids.values():
            assert not Path(f"/proc/{pid}").exists()
        assert mine.poll() is None
    finally:
        other.shutdown()
        mine.kill()
        mine.wait()


def test_the_traceback_of_the_worker_comes_along(tmp_path, monkeypatch):
    # Python imports this module at its start: the worker's loop then fails when told to.
    breaks = tmp_path / "break it"
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import pathlib, sys, threading, time

            def spoil():
                while (module := sys.modules.get("runtime.scheduler.scheduler")) is None or (
                    not hasattr(getattr(module, "Scheduler", None), "receive")
                ):
                    time.sleep(0.001)
                receive = module.Scheduler.receive

                def failing(self, messages):
                    if pathlib.Path({str(breaks)!r}).exists():
                        raise RuntimeError("the wheel broke")
                    return receive(self, messages)

                module.Scheduler.receive = failing

            if sys.orig_argv[-1] == "scheduler":
                threading.Thread(target=spoil, daemon=True).start()
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with sgl.Engine(**PLAIN) as engine:
        assert engine.generate(FRANCE, SHORT)["text"].startswith(" Paris")
        slow_down(engine)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(engine.generate, FRANCE, LONG)
            until(lambda: not is_idle(engine))
            breaks.touch()
            with pytest.raises(sgl.EngineDeadError) as caught:
                pending.result(60)
        for words in ("Traceback", "in failing", "RuntimeError: the wheel broke"):
            assert words in str(caught.value)
        with pytest.raises(sgl.EngineDeadError, match="the wheel broke"):
            engine.generate(FRANCE)


def test_a_worker_that_hangs_is_ended_and_told():
    others = children(os.getpid())
    with sgl.Engine(**PLAIN, watchdog_timeout=1.0) as engine:
        os.kill(engine_processes(os.getpid(), besides=others)["scheduler"], signal.SIGSTOP)
        with pytest.raises(sgl.EngineDeadError, match="no turn of its loop"):
            engine.generate(FRANCE, SHORT)


def test_last_words_of_a_child_are_kept(capfd):
    ended = threading.Event()
    child = Child("no such entry", {}, lambda *_: ended.set(), relays_stderr=True)
    assert ended.wait(60)
    assert child.last_words.startswith("Traceback")
    assert "Unknown child process 'no such entry'" in child.last_words
    assert child.last_words in capfd.readouterr().err


def test_pending_calls_end_with_the_engine():
    engine = sgl.Engine(**PLAIN)
    slow_down(engine)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(engine.generate, FRANCE, LONG)
        until(lambda: not is_idle(engine))
        engine.shutdown()
        with pytest.raises(sgl.EngineDeadError):
            pending.result(60)
    again = sgl.Engine(**PLAIN)
    assert again.generate(FRANCE, SHORT)["text"].startswith(" Paris")
    again.shutdown()


def test_a_fork_is_told_and_ends_nothing():
    # Here other threads may hold locks that the fork would wait for.
    done = run_script(
        f"""
        import os
        import headrace as sgl

        with sgl.Engine(**{PLAIN!r}) as engine:
            pid = os.fork()
            if pid == 0:
                try:
                    engine.generate({FRANCE!r}, {SHORT!r})
                except sgl.EngineError as error:
                    os.write(1, str(error).encode())
                finally:
                    engine.shutdown()
                    os._exit(0)
            os.waitpid(pid, 0)
            print(engine.generate({FRANCE!r}, {SHORT!r})["text"])
        """
    )
    assert done.returncode == 0, done.stderr
    assert "another process" in done.stdout
    assert " Paris" in done.stdout


def test_a_model_that_cannot_load_says_why(tmp_path):
    with pytest.raises(sgl.EngineStartError, match="absent"):
        sgl.Engine(model_path=str(tmp_path / "absent"))
    # Known before any process starts, in the words of keyword arguments.
    with pytest.raises(sgl.EngineStartError, match="page_size must be at least 1"):
        sgl.Engine(model_path=MODEL, page_size=0)
    # Found out by the child: its own words come along.
    with pytest.raises(sgl.EngineStartError, match=r"pool|memory|tokens"):
        sgl.Engine(model_path=MODEL, max_total_tokens=10**13)


def test_a_script_needs_no_guard_and_no_shutdown(tmp_path):
    # Also made in a thread and in a coroutine; what is left open ends in silence.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os, threading
            import headrace as sgl

            llm = sgl.Engine(model_path=os.environ["MODEL"])
            print(llm.generate("The capital of France is", {"max_new_tokens": 1})["output_ids"])
            stream = llm.generate("The", {"max_new_tokens": 500}, stream=True)
            next(stream)

            engines = []
            thread = threading.Thread(
                target=lambda: engines.append(sgl.Engine(model_path=os.environ["MODEL"])))
            thread.start()
            thread.join()

            async def main():
                return await engines[0].async_generate("The", {"max_new_tokens": 1})

            print(asyncio.run(main())["meta_info"]["completion_tokens"])
            print(*llm._core.host.pids().values(), *engines[0]._core.host.pids().values())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert not done.stderr
    pids = done.stdout.splitlines()[-1].split()
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_reimporting_child_of_the_user_gets_one_explanation(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os\n"
        "import headrace as sgl\n"
        "context = multiprocessing.get_context('spawn')\n"
        "if multiprocessing.current_process().name == 'MainProcess':\n"
        "    process = context.Process(target=print)\n"
        "    process.start(); process.join()\n"
        "else:\n"
        "    sgl.Engine(model_path=os.environ['MODEL'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.count("imports your script again") == 1


@pytest.mark.parametrize(("name", "word"), [("launch_engine", "Paris"), ("async_streams", "Tokyo")])
def test_the_examples_run(name, word, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert word in capsys.readouterr().out


def test_the_options_of_an_example_reach_the_engine(monkeypatch, capsys):
    options = ["--model-path", MODEL, "--max-running-requests", "3", "--log-level", "error"]
    monkeypatch.setattr(sys, "argv", ["offline_batch.py", *options])
    runpy.run_path(str(EXAMPLES / "offline_batch.py"), run_name="__main__")
    assert "Prompt: The capital of France is\nGenerated text:  Paris" in capsys.readouterr().out


def test_a_web_server_around_an_engine():
    app = runpy.run_path(str(EXAMPLES / "custom_server.py"))["app"]
    with TestClient(app) as client:
        answer = client.post("/generate", json={"prompt": FRANCE}).json()["text"]
        assert answer.startswith(" Paris")
        assert client.post("/generate_stream", json={"prompt": FRANCE}).text == answer
