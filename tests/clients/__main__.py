"""Runs every client in its environment against one demo server: `make test-clients`.

python -m tests.clients [CLIENT ...] [--server "ARGUMENTS"] [--pytest "ARGUMENTS"]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from xml.etree import ElementTree

from tests.clients.environments import ENVIRONMENTS, clients, prepare, python_of, version_of
from tests.support.server import ROOT, ServerProcess, python_path

# Schemathesis asks some forty thousand times.
TIMEOUT_S = 5400


@dataclass
class Outcome:
    """What the tests of a client said."""

    client: str
    version: str = "?"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether all tests ran and passed."""
        return self.passed > 0 and self.failed == 0 and self.skipped == 0

    def __str__(self) -> str:
        """A row of the table."""
        counts = f"{self.passed:6} {self.failed:6} {self.skipped:7} {self.seconds:7.0f}"
        return f"{self.client:14} {self.version:28} {counts}"


def run(client: str, url: str, options: list[str]) -> Outcome:
    """Install `client` and run its tests against the server at `url`."""
    outcome = Outcome(client)
    try:
        prepare(client)
    except subprocess.CalledProcessError as error:
        print(error)
        return outcome
    outcome.version = version_of(client)
    report = ENVIRONMENTS / client / "report.xml"
    report.unlink(missing_ok=True)
    tests = f"tests/clients/test_{client.partition('@')[0]}.py"
    pytest = [str(python_of(client)), "-m", "pytest", "-q", f"--junitxml={report}", tests]
    # None of them may look for a model or a tokenizer elsewhere.
    offline = {"HF_HUB_OFFLINE": "1", "HEADRACE_CLIENTS_URL": url, "PYTHONPATH": python_path()}
    began = time.monotonic()
    subprocess.run(
        [*pytest, *options], cwd=ROOT, env=os.environ | offline, timeout=TIMEOUT_S, check=False
    )
    outcome.seconds = time.monotonic() - began
    if report.exists():
        suite = ElementTree.parse(report).getroot()[0].attrib
        outcome.failed = int(suite["failures"]) + int(suite["errors"])
        outcome.skipped = int(suite["skipped"])
        outcome.passed = int(suite["tests"]) - outcome.failed - outcome.skipped
    return outcome


def main() -> int:
    """Run the clients that are named, or all; 1 if one of them was not shown to work."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("client", nargs="*", help="which; default: all")
    parser.add_argument("--server", default="", help="arguments of the server")
    parser.add_argument("--pytest", default="", help="arguments of pytest")
    arguments = parser.parse_args()
    chosen = arguments.client or clients()
    if unknown := sorted(set(chosen) - set(clients())):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(clients())}")
    with ServerProcess(*shlex.split(arguments.server)) as server:
        server.wait_ready()
        outcomes = []
        for client in chosen:
            print(f"\n{client}", flush=True)
            outcomes.append(run(client, server.url, shlex.split(arguments.pytest)))
    print(f"\n{'client':14} {'version':28} passed failed skipped seconds")
    print(*outcomes, sep="\n")
    print(f"{sum(o.passed for o in outcomes)} passed, {sum(o.failed for o in outcomes)} failed")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
