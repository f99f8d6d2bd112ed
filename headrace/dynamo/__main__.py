"""The command `python -m headrace.dynamo`: one worker of Dynamo."""

from __future__ import annotations

import sys

from dynamo.common.backend.run import run

from headrace.dynamo.backend import Backend
from runtime.errors import StartupError

if __name__ == "__main__":
    try:
        run(Backend)
    except StartupError as error:
        sys.exit(f"headrace: {' '.join(error.message.splitlines())}")
