"""Which uses in tests count as smells."""

from collections import Counter
from pathlib import PurePosixPath
from textwrap import dedent

import pytest

from tools.count_test_smells import count


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine.scheduler._planner.num", {"private": 1}),
        ("a._b._c", {"private": 2}),
        ("from runtime.x import _LIMIT, other", {"private": 1}),
        ("self._kept; cls._made; pair._replace(a=1); x.__dict__; os._exit(1)", {}),
        ("import runtime.x\npatch.setattr(runtime.x, 'LIMIT', 1)", {"patched": 1}),
        (
            "from runtime import x as module\nmonkeypatch.setattr(module, 'LIMIT', 1)",
            {"patched": 1},
        ),
        ("from runtime.x import Thing\nmonkeypatch.setattr(Thing, 'run', note)", {"patched": 1}),
        ("monkeypatch.setattr('server.x.LIMIT', 1)", {"patched": 1}),
        # Not ours, not a module, not a patch.
        ("import torch\nmonkeypatch.setattr(torch.cuda, 'Event', Event)", {}),
        ("monkeypatch.setattr('builtins.input', line)\nmonkeypatch.setattr(made, 'run', note)", {}),
        ("monkeypatch.setenv('HOME', 'x')", {}),
        ("import time\ntime.sleep(0.1)", {"slept": 1}),
        ("time.sleep(0); clock.sleep(delay_s)", {"slept": 1}),
    ],
)
def test_places(source: str, found: dict[str, int]) -> None:
    assert count([(PurePosixPath("tests/unit/test_x.py"), dedent(source))]) == Counter(found)


def test_only_tests_are_counted() -> None:
    assert not count([(PurePosixPath("runtime/x.py"), "a._b")])
