"""Decides how tests share the machine when `make test` runs several at a time.

The tests of a file run in one worker, one after the other, so that their shared fixtures are made
once. A test marked `alone` measures time or memory: no other test runs beside it. Consecutive
`alone` tests wait for the others only once.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.long_forms import keep_short_forms

# Before torch and numpy are imported: idle threads sleep, or are not there, instead of holding a
# core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Every HTTP client would read all of the authorities that the system trusts, for 18 ms; tests ask
# only servers that are here, and say which certificate they trust.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent / "support")

# How long an example takes says how busy the machine is. A change is judged by the same examples as
# the one before; `--hypothesis-profile=explore` looks for others.
_HERE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("here", _HERE, derandomize=True, database=None)
settings.register_profile("explore", _HERE, derandomize=False)
settings.load_profile("here")

HERE = Path(__file__).parent
# Libraries that count what they made find it gone. Not sooner: pytest, too, collects at its end.
atexit.register(gc.unfreeze)
# Their tests ask servers.
ASKING = ("faults", "e2e", "conformance")
# The long ones first, so that none of them is what everybody waits for in the end.
ORDER = (
    *ASKING,
    "kernels",
    "numerics",
    "page",
    "real",
    "unit",
    "structure",
    "gpu",
    "clients",
)
# Long tests that share nothing with the others of their file: any worker takes the next one.
SPREAD = {
    "tests/e2e/test_engine_life.py",
    "tests/e2e/test_launch.py",
    "tests/faults/test_kill.py",
    "tests/faults/test_kill_rank.py",
    "tests/faults/test_kill_replica.py",
    "tests/kernels/test_build.py",
    "tests/kernels/test_triton_interpreted.py",
    "tests/numerics/test_triton_backend.py",
}
# They share servers.
TOGETHER = {
    "tests/conformance/test_openai_checks.py": "demo",
    "tests/e2e/test_agent_loops.py": "demo",
    "tests/e2e/test_anthropic_client.py": "demo",
    "tests/e2e/test_lang.py": "demo",
    "tests/e2e/test_lang_examples.py": "demo",
    "tests/e2e/test_native_entropy.py": "chunks",
    "tests/e2e/test_native_logprobs.py": "chunks",
    "tests/e2e/test_pause_and_memory.py": "weights",
    "tests/e2e/test_rl_example.py": "weights",
    "tests/e2e/test_weights_from_disk.py": "weights",
    "tests/e2e/test_weights_from_trainer.py": "weights",
}
# A GPU is for one process at a time.
ON_GPU = os.environ.get("HEADRACE_TEST_DEVICE", "cpu") != "cpu" or (
    "HEADRACE_TEST_DEVICE" not in os.environ and Path("/dev/nvidiactl").exists()
)
# Both are locked by the workers of one test run; a lock ends with the process that holds it.
_DOOR, _ROOM = os.open(HERE, os.O_RDONLY), os.open(__file__, os.O_RDONLY)


def _work_unit(nodeid: str) -> str:
    """Which tests go to a worker together: those with the same name of their unit."""
    path = nodeid.split("::", 1)[0]
    if ON_GPU and not path.startswith(("tests/unit/", "tests/structure/")):
        return "gpu"
    return nodeid if path in SPREAD else TOGETHER.get(path, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores, as tests wait for servers; no more than memory is for."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = _work_unit
    return scheduler


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """What thousands of tests consist of lives to the end: the garbage collector never looks at it.

    It would take 4 of the 17 seconds of processor time that collecting takes each worker, and half
    a second whenever it looks at everything.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long forms of tests")


# After `-k` and `-m`: what they select is a table of its own.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ON_GPU:
        keep_short_forms(config, items)
    if _is_worker(config):
        alone = {_work_unit(item.nodeid) for item in items if _is_for_one_alone(item)}
        items.sort(
            key=lambda item: (
                # A test that runs alone waits for all others; early on there are few long ones.
                _work_unit(item.nodeid) not in alone,
                ORDER.index(_folder(item)),
            )
        )


class _Turns:
    """One test after the other in this worker's turn to run."""

    def __init__(self) -> None:
        self._is_alone = False

    @contextmanager
    def take(self, *, alone: bool, next_alone: bool) -> Iterator[None]:
        if not self._is_alone:
            # Who waits to be alone stands in the door, so that nobody enters before.
            fcntl.flock(_DOOR, fcntl.LOCK_EX)
            fcntl.flock(_ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(_DOOR, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._is_alone = alone and next_alone
            if not self._is_alone:
                fcntl.flock(_ROOM, fcntl.LOCK_UN)


_turns = _Turns()


def _is_for_one_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


def _turn_of(item: pytest.Item, next_item: pytest.Item | None) -> AbstractContextManager[None]:
    if not _is_worker(item.config):
        return nullcontext()
    return _turns.take(alone=_is_for_one_alone(item), next_alone=_is_for_one_alone(next_item))


def _seed_torch(item: pytest.Item) -> None:
    # pytest-randomly has numpy and `random` draw what does not depend on the order of the tests.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed_torch(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed_torch(item)


def _stop_servers(next_item: pytest.Item) -> None:
    module = sys.modules.get("tests.support.server")
    if module is not None:
        module.stop_servers(also_common=_folder(next_item) not in ASKING)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    with _turn_of(item, nextitem):
        result = yield
    if nextitem is not None and _work_unit(item.nodeid) != _work_unit(nextitem.nodeid):
        _stop_servers(nextitem)
        # What is left is imported or kept for other files: looked at once, and never again.
        gc.collect()
        gc.freeze()
    return result
