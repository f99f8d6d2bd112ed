"""The table of `headrace explain ID`: where each millisecond of a request went, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_BAR = 30


def told_requests(found: dict[str, Any]) -> list[str]:
    """Format an answer of `/explain_request` as lines for the terminal."""
    lines: list[str] = []
    for request in found["requests"]:
        lines += ["", *_told(request)] if lines else _told(request)
    return lines


def _told(request: dict[str, Any]) -> Iterator[str]:
    total = request["total_ms"]
    first = request["first_token_ms"]
    until = "" if first is None else f", first token after {first:.1f} ms"
    yield f"request  {request['rid']} ({request['outcome'] or 'running'}): {total:.1f} ms{until}"
    yield (
        f"tokens   {request['prompt_tokens']} of the prompt, {request['cached_tokens']} of them "
        f"cached; {request['completion_tokens']} of the answer"
    )
    if request["retractions"] or request["resumes"]:
        yield f"again    retracted {request['retractions']}, resumed {request['resumes']} times"
    yield ""
    for stage in request["stages"]:
        share = stage["ms"] / total if total else 0.0
        yield f"{stage['name']:<26}{stage['ms']:>11.1f} ms {'#' * round(_BAR * share)}".rstrip()
        for name, ms in stage["parts"].items():
            yield f"  {name:<24}{ms:>11.1f} ms"
    yield from _prompt(request)
    yield ""
    if not request["causes"]:
        yield "Nothing that it waited for took a twentieth of its time."
    for cause in request["causes"]:
        yield f"{cause['name']}: {cause['ms']:.1f} ms. {cause['text']}"


def _prompt(request: dict[str, Any]) -> Iterator[str]:
    chunks = [f"{each['tokens']} at {each['at_ms']:.1f} ms" for each in request["prompt_chunks"]]
    if chunks:
        more = request["num_prompt_chunks"] - len(chunks)
        yield f"chunks   {', '.join(chunks)}" + (f", and {more} more" if more else "")
    if request["steps"]:
        yield f"steps    {request['steps']}, {request['steps_with_prompts']} with other prompts"
    left = request["prefix"]
    if left is not None:
        kind = "cached prompts differ there" if left["kind"] == "differs" else "cached prompts end"
        place = ", in the system message" if left["in_system"] else ""
        yield f"cache    left at token {left['index']}: {kind}{place}"
        yield f"  before {json.dumps(left['before'], ensure_ascii=False)}"
        yield f"  after  {json.dumps(left['after'], ensure_ascii=False)}"
