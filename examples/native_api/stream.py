"""Print an answer while it is generated.

Run `python examples/native_api/stream.py --url URL`.
"""

import argparse
import json

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

body = {
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 32},
    "stream": True,
}
with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
    response.raise_for_status()
    shown = 0
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        answer = json.loads(line.removeprefix("data: "))
        if "error" in answer:
            # The prompt is too long, or the request failed after the first event.
            raise SystemExit(answer["error"]["message"])
        # Each event holds the whole text so far, not only the new part.
        text = answer["text"]
        print(text[shown:], end="", flush=True)
        shown = len(text)
print()
