"""`headrace explain FILE` shows where a request's prompt diverges from the prefix cache."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from headrace.chat import ChatFailed, connect, refusal
from headrace.cli import DEFAULT_URL

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_KINDS = {
    "differs": "the cached prompt has another token there",
    "new": "the cached prompt ends there",
}


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="headrace explain",
        description="Ask a running server how much of a request's prompt its prefix cache holds, "
        "and where the two diverge. The server must be started with --enable-cache-report.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="the request's JSON body; - for standard input"
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    parser.add_argument("--api-key", help="the key that the request would be sent with")
    parser.add_argument(
        "--route", choices=ROUTES, help="the request's route; by default inferred from its keys"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the server's report; the exit status is 2 when there is none."""
    options = build_parser().parse_args(argv)
    try:
        body = _read(options.file)
        route = options.route or route_of(body)
        with connect(options.url, options.api_key) as client:
            answer = client.post("/explain_cache", json={"route": route, "body": body})
    except (OSError, ValueError, ChatFailed, httpx.HTTPError) as error:
        return _fail(str(error) or type(error).__name__)
    if answer.status_code != 200:
        return _fail(refusal(answer))
    sys.stdout.write("".join(f"{line}\n" for line in told(answer.json())))
    return 0


def route_of(body: dict[str, Any]) -> str:
    """The route for a body, chosen by its keys."""
    if "input" in body:
        return ROUTES[1]
    return ROUTES[2] if "system" in body or "anthropic_version" in body else ROUTES[0]


def told(found: dict[str, Any]) -> list[str]:
    """The lines to print."""
    prompt, cached, broken = (
        found[key] for key in ("prompt_tokens", "cached_tokens", "cache_break")
    )
    lines = [f"prompt  {prompt} tokens", f"cached  {cached} tokens ({cached / prompt:.0%})"]
    if broken is None:
        return [*lines, "The whole prompt is cached."]
    return [
        *lines,
        f"break   at token {broken['index']}: {_KINDS[broken['kind']]}",
        f"before  {json.dumps(broken['before'], ensure_ascii=False)}",
        f"after   {json.dumps(broken['after'], ensure_ascii=False)}",
    ]


def _read(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError(f"{file} does not hold a JSON object.")
    return body


def _fail(why: str) -> int:
    sys.stderr.write(f"headrace: {why}\n")
    return 2
