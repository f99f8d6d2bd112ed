"""Continue one prompt, then several at once.

Run `python examples/native_api/generate.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

body = {
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 16},
}
answer = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
print(answer["text"])
print(answer["meta_info"]["finish_reason"], answer["meta_info"]["completion_tokens"], "tokens")

# A list of prompts gives a list of answers; `n` gives several answers for each prompt.
body = {
    "text": ["The capital of Japan is", "The capital of Italy is"],
    "sampling_params": {"temperature": 0.7, "max_new_tokens": 8, "n": 2, "sampling_seed": 1},
}
for answer in httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json():
    print(answer["meta_info"]["id"], answer["text"])
