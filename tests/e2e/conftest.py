"""Engines in the test process start their processes as forks; see `tests/support/warm_start.py`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.warm_start import WarmPopen

# They kill processes of engines, and look at how others are started again.
_PLAIN = "test_engine_life.py"


@pytest.fixture(scope="module", autouse=True)
def _warm_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != _PLAIN:
            patch.setattr(subprocess, "Popen", WarmPopen)
        yield
