"""Abort a running request by another request.

Run `python examples/native_api/abort.py --url URL`.
"""

import argparse
import json

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

body = {
    "text": "The capital of France is",
    "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    "rid": "a-long-one",
    "stream": True,
}
with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
    asked = False
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        if not asked:
            httpx.post(f"{url}/abort_request", json={"rid": "a-long-one"}).raise_for_status()
            asked = True
        answer = json.loads(line.removeprefix("data: "))
        if "error" in answer:
            raise SystemExit(answer["error"]["message"])
# An aborted request keeps the tokens generated so far.
print(answer["meta_info"]["finish_reason"]["type"], answer["meta_info"]["completion_tokens"] > 0)
