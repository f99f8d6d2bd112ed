"""The address of a collector, and an extra that is not installed."""

from __future__ import annotations

import sys

import pytest

from runtime.errors import StartupError
from server.tracing import check_tracing, traces_url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_addresses(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["", "ftp://host", "http://", "host:99999", "a b", "a\nb:1"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(StartupError, match="--otlp-traces-endpoint"):
        check_tracing(endpoint)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(StartupError, match=r"headrace\[otel\]"):
        check_tracing("localhost:4318")
