"""The command `python -m headrace.dynamo`: one worker of Dynamo."""

from __future__ import annotations

from dynamo.common.backend.run import run

from headrace.dynamo.backend import Backend

if __name__ == "__main__":
    run(Backend)
