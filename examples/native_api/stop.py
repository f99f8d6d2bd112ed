"""End an answer at a string or at a pattern.

Run `python examples/native_api/stop.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

for stop in (
    {"stop": ["."]},
    {"stop": ["."], "no_stop_trim": True},
    # The search takes linear time, so any pattern is safe. Text that may become a match is held
    # back.
    {"stop_regex": r"[.!?]\s+[A-Z]"},
):
    body = {
        "text": "The capital of France is",
        "sampling_params": {"temperature": 0, "max_new_tokens": 64, **stop},
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
    print(stop, "->", repr(answer["text"]), answer["meta_info"]["finish_reason"])
