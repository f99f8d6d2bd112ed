"""Finds out whether a request prefers an HTML page to JSON, by its header `Accept`."""

from __future__ import annotations

from starlette.types import Scope

_HTML, _JSON = "text/html", "application/json"


def prefers_html(scope: Scope) -> bool:
    """Whether `Accept` ranks HTML above JSON, as it does when a browser opens a page.

    False for `*/*`, for equal ranks and without the header. Programs send such requests, and they
    get JSON.
    """
    ranks: dict[str, float] = {}
    for name, value in scope["headers"]:
        if name == b"accept":
            for part in value.decode("latin-1").lower().split(","):
                kind, *parameters = (each.strip() for each in part.split(";"))
                ranks[kind] = max(ranks.get(kind, 0.0), _quality(parameters))
    if _HTML not in ranks:
        return False
    json_rank = next((ranks[kind] for kind in (_JSON, "application/*", "*/*") if kind in ranks), 0)
    return ranks[_HTML] > json_rank


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
