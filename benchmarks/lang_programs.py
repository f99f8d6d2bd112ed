"""The programs of `benchmarks.lang`; each job runs in a separate process, with either frontend.

    python benchmarks/lang_programs.py --frontend headrace|sglang --url URL --job JOB --num N

The job prints one JSON object. The programs use only names that both frontends have.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import resource
import threading
import time
from typing import Any

SYSTEM = (
    "You are a helpful assistant that answers in a few words, and says so when it does not know."
)
MAX_TOKENS = 4
CHOICES = [" London", " Paris", " Berlin"]


def questions(num: int) -> list[dict[str, str]]:
    """Return the arguments of `num` programs."""
    return [{"question": f"What is {number % 97} + {number % 89}?"} for number in range(num)]


def make_programs(sgl: Any) -> tuple[Any, Any]:
    """Return two programs: one generates an answer, and one selects among choices."""

    @sgl.function
    def ask(s: Any, question: str) -> None:
        s += sgl.system(SYSTEM)
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=MAX_TOKENS, temperature=0))

    @sgl.function
    def choose(s: Any, question: str) -> None:
        s += SYSTEM + " " + question + " The capital of France is"
        s += sgl.select("answer", CHOICES)

    return ask, choose


def run_programs(sgl: Any, job: str, num: int, at_once: int) -> dict[str, Any]:
    """Run `num` programs, `at_once` of them at a time."""
    ask, choose = make_programs(sgl)
    program = choose if job == "select" else ask
    began, cpu = time.perf_counter(), time.process_time()
    states = program.run_batch(questions(num), num_threads=at_once)
    answers = [state["answer"] for state in states]
    return {
        "answers": answers,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "threads": threading.active_count(),
        "text": states[0].text(),
    }


async def plain_client(url: str, num: int, at_once: int, prompts: list[str]) -> dict[str, Any]:
    """Send the same requests with plain asyncio, without a frontend."""
    from headrace.http_stream import HttpClient

    client = HttpClient(url, {"Content-Type": "application/json"}, 600.0)
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> str:
        body = {
            "text": prompt,
            "sampling_params": {
                "max_new_tokens": MAX_TOKENS,
                "temperature": 0,
                "stop": ["<|im_end|>"],
            },
        }
        async with gate:
            _, answer = await client.call("POST", "/generate", json.dumps(body).encode())
        return str(json.loads(answer)["text"])

    began, cpu = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts[:num]))
    client.close()
    return {
        "answers": answers,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "threads": threading.active_count(),
    }


def run_kinds(sgl: Any) -> list[str]:
    """Run several kinds of programs and return their texts.

    The kinds are turns, a branch, forks, a form, a stream and a batch.
    """
    greedy = {"temperature": 0, "max_tokens": 24, "stop": "\n"}

    @sgl.function
    def turns(s: Any) -> None:
        s += sgl.user("What is the capital of France?")
        s += sgl.assistant(sgl.gen("first", **greedy))
        with s.user():
            s += "And of " + "Japan?"
        s += sgl.assistant_begin()
        s += sgl.gen("second", **greedy)
        s += sgl.assistant_end()

    @sgl.function
    def branch(s: Any, question: str) -> None:
        s += sgl.user(question)
        s += sgl.assistant("I need a " + sgl.gen("tool", choices=["calculator", "calendar"]) + ": ")
        if s["tool"] == "calculator":
            s += sgl.assistant(sgl.gen("sum", regex=r"[0-9]{1,3} \+ [0-9]{1,3}", temperature=0))

    @sgl.function
    def forks(s: Any) -> None:
        s += sgl.user("What is the capital of Italy?")
        children = s.fork(2)
        for number, child in enumerate(children):
            child += sgl.assistant(f"{number + 1}. " + sgl.gen("tip", **greedy))
        children.join()

    @sgl.function
    def streamed(s: Any) -> None:
        s += sgl.user("Who wrote Hamlet?")
        s += sgl.assistant(sgl.gen("answer", **greedy))

    first, second, third = turns.run(), branch.run("What is 23 + 19?"), forks.run()
    fourth = streamed.run(stream=True)
    pieces = list(fourth.text_iter("answer"))
    states = streamed.run_batch([{}, {}])
    return [
        *(first["first"], first["second"], first.text(), str(first.messages())),
        *(second["tool"], second["sum"], second.text()),
        *(*third["tip"], third.text()),
        *("".join(pieces), fourth.text()),
        *(state["answer"] for state in states),
    ]


def hold_programs(sgl: Any, num: int) -> dict[str, Any]:
    """Start `num` programs without reading their answers; measure their threads and memory."""
    ask, _ = make_programs(sgl)
    ask.run(question="Warm up.").sync()
    before = _resident_bytes()
    began = time.perf_counter()
    states = [ask.run(**each) for each in questions(num)]
    started = time.perf_counter() - began
    threads, held = threading.active_count(), _resident_bytes() - before
    for state in states:
        state.cancel()
    return {
        "threads": threads,
        "bytes_each": held / num,
        "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "start_seconds": started,
        "seconds": time.perf_counter() - began,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run one job and print its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frontend", default="headrace")
    parser.add_argument("--url", required=True)
    parser.add_argument(
        "--job", choices=["batch", "select", "plain", "hold", "kinds"], required=True
    )
    parser.add_argument("--num", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=256)
    options = parser.parse_args()
    sgl = importlib.import_module(options.frontend)
    # The chat template is set explicitly, because the two frontends look for it in different
    # places.
    backend = sgl.RuntimeEndpoint(options.url, chat_template_name="chatml")
    sgl.set_default_backend(backend)
    if options.job == "hold":
        found = hold_programs(sgl, options.num)
    elif options.job == "kinds":
        found = {"answers": run_kinds(sgl)}
    elif options.job == "plain":
        begin, end = "<|im_start|>", "<|im_end|>\n"
        prompts = [
            f"{begin}system\n{SYSTEM}{end}{begin}user\n{each['question']}{end}{begin}assistant\n"
            for each in questions(options.num)
        ]
        found = asyncio.run(plain_client(options.url, options.num, options.at_once, prompts))
    else:
        found = run_programs(sgl, options.job, options.num, options.at_once)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
