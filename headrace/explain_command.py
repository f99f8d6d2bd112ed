"""`headrace explain` tells where a request's time went, or which part of its prompt is uncached."""

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
from headrace.explain_request import told_requests

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_KINDS = {
    "differs": "the cached prompt has another token there",
    "new": "the cached prompt ends there",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of `headrace explain`."""
    parser = argparse.ArgumentParser(
        prog="headrace explain",
        description="With the ID of a request (its rid, its answer's id, or the x-request-id of "
        "its response), tell where each millisecond of it went and what it waited for. With a FILE "
        "that holds a request's JSON body, ask how much of its prompt the prefix cache holds, and "
        "where the two diverge; for this the server must be started with --enable-cache-report.",
    )
    parser.add_argument(
        "target",
        metavar="ID|FILE",
        help="one of the server's last 10,000 requests; or a file, - for standard input",
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    parser.add_argument("--api-key", help="the key that the request was sent with, or the admin's")
    parser.add_argument(
        "--route", choices=ROUTES, help="the FILE's route; by default inferred from its keys"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `headrace explain`: print the server's report.

    Returns:
        The exit status: 0, or 2 if the server gave no report.
    """
    options = build_parser().parse_args(argv)
    target: str = options.target
    try:
        if target == "-" or options.route or Path(target).is_file():
            body = _read(target)
            path, tell = "/explain_cache", told
            asked: dict[str, Any] = {"route": options.route or route_of(body), "body": body}
        else:
            path, tell, asked = "/explain_request", told_requests, {"id": target}
        with connect(options.url, options.api_key) as client:
            answer = client.post(path, json=asked)
    except (OSError, ValueError, ChatFailed, httpx.HTTPError) as error:
        return _fail(str(error) or type(error).__name__)
    if answer.status_code != 200:
        return _fail(refusal(answer))
    lines = [json.dumps(answer.json(), indent=2)] if options.json else tell(answer.json())
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def route_of(body: dict[str, Any]) -> str:
    """Return the route to which a request body belongs, guessed from its keys."""
    if "input" in body:
        return ROUTES[1]
    return ROUTES[2] if "system" in body or "anthropic_version" in body else ROUTES[0]


def told(found: dict[str, Any]) -> list[str]:
    """Format an answer of `/explain_cache` as lines for the terminal."""
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
