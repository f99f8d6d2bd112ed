"""The `headrace` command, which has these subcommands.

`serve` starts a server. `chat` talks to a running server. `batch` answers a file of requests
without a server. `doctor` reports what this machine offers and what a model needs. `warm` compiles
a model's kernels before its first start. `bench` measures speed. `explain` shows where a request's
time went.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from headrace import __version__

DEFAULT_URL = "http://127.0.0.1:30000"
# For each benchmark its description in `--help`, and its module. The module is imported only when
# the benchmark is chosen; its `main(argv)` runs the benchmark and returns the exit status.
BENCHMARKS = {
    "serving": ("load on a running server, ours or another", "headrace.bench.serving"),
    "offline": ("throughput of the engine without HTTP", "headrace.bench.offline"),
    "latency": ("time of one batch, repeated, without HTTP", "headrace.bench.latency"),
    "one-batch": ("prefill and decode steps at the worker itself", "headrace.bench.one_batch"),
    "shape": (
        "write a model folder without weights, for --load-format dummy",
        "headrace.bench.shapes",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the `headrace` command; `serve` passes its arguments on unparsed."""
    parser = argparse.ArgumentParser(prog="headrace", description="A small, fast LLM server.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # `serve` has no -h of its own, so that `serve --help` shows the server's options.
    commands.add_parser(
        "serve",
        help="start a server (of the model `demo` without --model-path)",
        add_help=False,
    )
    batch = commands.add_parser(
        "batch",
        help="run a file of requests through a model, without a server",
        usage="headrace batch INPUT OUTPUT [the options of headrace serve]",
        description="Run each line of INPUT and write the answers to OUTPUT, both JSON lines. A "
        "line holds text, input_ids or messages, and may hold sampling_params and an id. If the "
        "command is stopped and started again, it runs the requests that have no answer.",
    )
    batch.add_argument("input", metavar="INPUT", help="the requests, one JSON object a line")
    batch.add_argument("output", metavar="OUTPUT", help="the answers, in order of completion")
    commands.add_parser(
        "doctor",
        help="report what this machine offers, and what a model needs, from its config.json alone",
        add_help=False,
    )
    commands.add_parser(
        "warm",
        help="compile a model's kernels into a folder, ahead of its first start",
        add_help=False,
    )
    commands.add_parser(
        "experts",
        help="report how evenly experts were used, from a recorded file",
        add_help=False,
    )
    commands.add_parser(
        "explain",
        help="tell where a request's time went, or where its prompt leaves the prefix cache",
        add_help=False,
    )
    chat = commands.add_parser(
        "chat",
        help="chat with a running server",
        description="Chat with a running server; piped input is one question per line.",
    )
    chat.add_argument("--url", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    chat.add_argument("--model", help="the model's name; by default the one that the server lists")
    chat.add_argument("--system", help="a system message before the conversation")
    chat.add_argument("--api-key", help="the server's key, if it needs one")
    chat.add_argument("--max-tokens", type=int, help="longest answer, tokens")
    chat.add_argument("--temperature", type=float, help="0 takes the most probable token each time")
    chat.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons first; by default as the model does",
    )
    bench = commands.add_parser(
        "bench",
        help="measure a server or the engine",
        description="Measure a server or the engine; see `headrace bench NAME --help`.",
    )
    names = bench.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, (text, _) in BENCHMARKS.items():
        names.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        # Imported only here, because the other subcommands do not need the server's modules.
        from server.launch import main as launch

        launch(arguments[1:], prog="headrace serve")
        return
    if arguments[:1] == ["batch"]:
        # The names of both files come first; the server's parser reads the remaining arguments.
        options = build_parser().parse_args(arguments[:3])
        from headrace.batch import main as run_batch

        sys.exit(run_batch(options.input, options.output, arguments[3:], sys.stderr))
    if arguments[:1] == ["doctor"]:
        from headrace.doctor.command import main as examine

        sys.exit(examine(arguments[1:]))
    if arguments[:1] == ["warm"]:
        from headrace.warm import main as warm

        sys.exit(warm(arguments[1:], sys.stderr))
    if arguments[:1] == ["experts"]:
        from headrace.experts.print_balance import main as tell_experts

        sys.exit(tell_experts(arguments[1:]))
    if arguments[:1] == ["explain"]:
        from headrace.explain_command import main as explain

        sys.exit(explain(arguments[1:]))
    if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHMARKS:
        _, module = BENCHMARKS[arguments[1]]
        sys.exit(importlib.import_module(module).main(arguments[2:]))
    sys.exit(_chat(build_parser().parse_args(arguments)))


def _chat(options: argparse.Namespace) -> int:
    from headrace.chat import ChatFailed, ChatSession, connect, converse

    try:
        with connect(options.url, options.api_key) as client:
            session = ChatSession(
                client,
                model=options.model,
                system=options.system,
                thinking=options.thinking,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
            )
            return converse(session, sys.stdin, sys.stdout, sys.stderr)
    except BrokenPipeError:
        # With `headrace chat | head` standard output may be closed. Python would fail when it
        # flushes standard output at exit, so the output is redirected.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ChatFailed as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    main()
