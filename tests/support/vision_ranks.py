"""Prints the tokens of two ranks for prompts with images.

Run as `python -m tests.support.vision_ranks FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime.ipc.standard_error import leave_at_once
from tests.support.engine import InProcessEngine
from tests.support.tiny_vision import NUM_NEW, PROMPTS


def main() -> None:
    """Print the tokens of each prompt, a JSON list of lists."""
    engine = InProcessEngine(Path(sys.argv[1]), tp_size=2, chunked_prefill_size=9)
    for number, prompt in enumerate(PROMPTS, 1):
        engine.add(number, prompt.ids, NUM_NEW, ignore_eos=True, images=prompt.images)
    engine.run()
    print(json.dumps([engine.tokens[number] for number in range(1, len(PROMPTS) + 1)]), flush=True)
    # The process exits without clean-up, as a worker does, because threads of the process group are
    # still running.
    leave_at_once(0)


if __name__ == "__main__":
    main()
