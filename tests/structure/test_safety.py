"""Nothing that crosses a process or comes from a user is unpickled or evaluated."""

import re
from pathlib import Path

import pytest

from tools.code_lines import PRODUCT

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = re.compile(
    r"\bpickle\b|\bdill\b|recv_pyobj|send_pyobj|torch\.load\(|(?<![\w.])eval\(|(?<![\w.])exec\("
    r"|shell=True|yaml\.load\("
)
# Words about the danger are no danger.
ALLOWED = {
    "runtime/checkpoint/headers.py": {"pickle"},
}


@pytest.mark.parametrize("folder", [*PRODUCT, "recipes", "tools"])
def test_no_unsafe_decoding(folder: str) -> None:
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            match = FORBIDDEN.search(code)
            if match and match.group() not in ALLOWED.get(name, set()) and '"' not in code:
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found


# The time of the day, which jumps, stands in answers, names of files and the log.
DATED = {
    "openai_api/endpoints/batches.py",
    "openai_api/endpoints/classify.py",
    "openai_api/openai_context.py",
    "openai_api/responses/compaction.py",
    "openai_api/responses/response_run.py",
    "openai_api/template_sandbox.py",
    "runtime/cache/kv_events.py",
    "runtime/executor/expert_recorder.py",
    "runtime/requests/identity.py",
    "runtime/service/generation.py",
    "runtime/service/profiling.py",
    "server/adapter_metrics.py",
    "server/entry/last_errors.py",
    "server/native/loads.py",
    "server/native/pooling.py",
    "server/request_log.py",
    "server/tracing.py",
}
CLOCK = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")


def test_the_clock_of_the_day_dates_and_decides_nothing() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("runtime", "openai_api", "server")
        for path in (ROOT / folder).rglob("*.py")
        if CLOCK.search(path.read_text())
    }
    assert found == DATED
