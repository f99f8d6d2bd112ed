"""Shows a program's steps and times, as text for a terminal or as one HTML page without scripts."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.lang.events import Event, Usage

_REQUESTS = frozenset({"gen", "select"})
_SHOWN_CHARS = 60
_COLUMNS = ("at", "ms", "first", "prompt", "cached", "new")


class _Row(NamedTuple):
    """The numbers of one event; a number that the back end does not report is `None`."""

    event: Event
    text: str
    at_ms: float
    took_ms: float | None
    first_ms: float | None
    prompt: int | None
    cached: int | None
    completion: int | None


def _rows(text: str, events: Sequence[Event]) -> list[_Row]:
    if not events:
        return []
    zero = events[0].began_s
    rows = []
    for event in events:
        meta = _first(event.meta)
        is_request = event.kind in _REQUESTS
        ended, first = event.ended_s, event.first_s
        rows.append(
            _Row(
                event,
                text[event.start : event.end],
                (event.began_s - zero) * 1000,
                (ended - event.began_s) * 1000 if is_request and ended is not None else None,
                (first - event.began_s) * 1000 if is_request and first is not None else None,
                meta.get("prompt_tokens"),
                meta.get("cached_tokens"),
                meta.get("completion_tokens"),
            )
        )
    return rows


def _first(meta: Any) -> dict[str, Any]:
    """Return the meta information of a request's first answer, with which the text continues."""
    if isinstance(meta, list):
        meta = meta[0] if meta else None
    return meta if isinstance(meta, dict) else {}


def _label(event: Event) -> str:
    return f"{event.kind} {event.name}" if event.name else event.kind


def explain_text(text: str, events: Sequence[Event], usage: Usage) -> str:
    """Format a timeline with one line for each event.

    Args:
        text: the program's whole text.
        events: the program's events, in order.
        usage: the usage of the program.

    Returns:
        Columns: milliseconds since the start, milliseconds that the request took, milliseconds to
        its first piece, prompt tokens, cached prompt tokens, generated tokens, and the appended
        text.
    """
    lines = [f"{'':24}" + "".join(f"{name:>9}" for name in _COLUMNS)]
    for row in _rows(text, events):
        numbers = (row.took_ms, row.first_ms, row.prompt, row.cached, row.completion)
        cells = f"{row.at_ms:9.1f}" + "".join(_cell(number) for number in numbers)
        shown = json.dumps(row.text, ensure_ascii=False)
        if len(shown) > _SHOWN_CHARS:
            shown = shown[: _SHOWN_CHARS - 4] + '..."'
        failed = f"  !! {row.event.error}" if row.event.error is not None else ""
        lines.append(f"{_label(row.event)[:23]:24}{cells}  {shown}{failed}")
    return "\n".join([*lines, _total(usage)])


def _cell(number: float | int | None) -> str:
    if number is None:
        return f"{'':9}"
    return f"{number:9.1f}" if isinstance(number, float) else f"{number:9d}"


def _total(usage: Usage) -> str:
    requests = "1 request" if usage.num_requests == 1 else f"{usage.num_requests} requests"
    return (
        f"{requests}: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated, {usage.seconds * 1000:.1f} ms"
    )


# ---- the page ----

_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.2rem}h2{font-size:1rem;margin-top:2rem}
pre,.text{font:13px/1.6 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}
td,th{padding:.15rem .5rem;text-align:right;border-bottom:1px solid #8884;vertical-align:top}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}
.bar{position:relative;height:.8rem;min-width:12rem;background:#8882}
.bar i{position:absolute;top:0;bottom:0;background:#5b8def}
.bar i.wait{background:#c9a227}
.gen{background:#5b8def33;border-bottom:2px solid #5b8def}
.select{background:#3aa17633;border-bottom:2px solid #3aa176}
.role_begin,.role_end{opacity:.55}
.error{color:#d33}
.hint{opacity:.7}
.token{border-radius:2px}
"""


def explain_html(text: str, events: Sequence[Event], usage: Usage, *, title: str) -> str:
    """Return an HTML page with the timeline, the text, and tokens with their probabilities.

    The page needs no other files.

    Args:
        text: the program's whole text.
        events: the program's events, in order.
        usage: the usage of the program.
        title: title of the page.
    """
    rows = _rows(text, events)
    total_ms = max((row.at_ms + (row.took_ms or 0.0) for row in rows), default=0.0)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p>{html.escape(_total(usage))}</p>",
        "<h2>Timeline</h2>",
        "<p class='hint'>Milliseconds. Yellow: until the first piece; blue: until the end.</p>",
        "<table><tr><th>What</th><th>At</th><th>Took</th><th>Prompt</th><th>Cached</th>",
        "<th>Generated</th><th>When</th></tr>",
        *(_timeline_row(row, total_ms) for row in rows),
        "</table><h2>Text</h2><div class='text'>",
        *(_marked(row) for row in rows),
        "</div>",
        *(_request(row) for row in rows if row.event.kind in _REQUESTS),
        "</html>",
    ]
    return "\n".join(parts[:9]) + "".join(parts[9:]) + "\n"


def _timeline_row(row: _Row, total_ms: float) -> str:
    scale = 100 / total_ms if total_ms else 0.0
    bar = ""
    if row.took_ms is not None:
        first = row.first_ms if row.first_ms is not None else row.took_ms
        bar = (
            "<div class='bar'>"
            f"<i class='wait' style='left:{row.at_ms * scale:.2f}%;width:{first * scale:.2f}%'></i>"
            f"<i style='left:{(row.at_ms + first) * scale:.2f}%;"
            f"width:{(row.took_ms - first) * scale:.2f}%'></i></div>"
        )
    cells = (
        html.escape(_label(row.event)),
        f"{row.at_ms:.1f}",
        "" if row.took_ms is None else f"{row.took_ms:.1f}",
        *("" if n is None else str(n) for n in (row.prompt, row.cached, row.completion)),
        bar,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _marked(row: _Row) -> str:
    if not row.text:
        return ""
    label = html.escape(_label(row.event), quote=True)
    return f"<span class='{row.event.kind}' title='{label}'>{html.escape(row.text)}</span>"


def _request(row: _Row) -> str:
    event, meta = row.event, _first(row.event.meta)
    parts = [f"<h2>{html.escape(_label(event))}</h2>"]
    if event.error is not None:
        parts.append(f"<p class='error'>{html.escape(str(event.error))}</p>")
    if row.prompt:
        cached = row.cached or 0
        share = f"{cached / row.prompt:.0%}"
        parts.append(f"<p>{cached} of {row.prompt} prompt tokens cached ({share})</p>")
    if event.sampling:
        asked = json.dumps(event.sampling, ensure_ascii=False, default=str)
        parts.append(f"<p class='hint'>{html.escape(asked)}</p>")
    choices = (event.sampling or {}).get("choices")
    scores = meta.get("normalized_prompt_logprobs")
    if choices and isinstance(scores, list) and len(scores) == len(choices):
        parts.append("<table><tr><th>Choice</th><th>Mean log-probability</th><th></th></tr>")
        for choice, score in zip(choices, scores, strict=True):
            chosen = "chosen" if choice == row.text else ""
            parts.append(
                f"<tr><td>{html.escape(choice)}</td><td>{score:.4f}</td><td>{chosen}</td></tr>"
            )
        parts.append("</table>")
    tokens = meta.get("output_token_logprobs")
    if event.kind == "gen" and tokens:
        parts.append("<div class='text'>" + "".join(map(_token, tokens)) + "</div>")
    elif row.text:
        parts.append(f"<div class='text'>{html.escape(row.text)}</div>")
    return "\n".join(parts) + "\n"


def _token(entry: Sequence[Any]) -> str:
    """Format a token as HTML; its background is redder, the less probable the token was.

    A tooltip shows the probability in percent.

    Args:
        entry: the token's log-probability or `None`, its id, and perhaps its text, as in
            `output_token_logprobs` of `/generate`.
    """
    logprob, token_id, *rest = entry
    shown = rest[0] if rest and isinstance(rest[0], str) else f"[{token_id}]"
    if logprob is None:
        return html.escape(shown)
    probability = math.exp(logprob)
    return (
        f"<span class='token' style='background:rgb(221 51 51/{(1 - probability) * 60:.0f}%)' "
        f"title='{probability:.1%}'>{html.escape(shown)}</span>"
    )
