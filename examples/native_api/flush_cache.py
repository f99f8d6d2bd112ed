"""Clear the prefix cache, and show the effect.

Run `python examples/native_api/flush_cache.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=60)


def cached_tokens() -> int:
    text = "The miller opens the gate, the wheel turns, and the stones grind wheat and oats. " * 4
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    answer = client.post("/generate", json=body).raise_for_status().json()
    return answer["meta_info"]["cached_tokens"]


cached_tokens()
print("again:", cached_tokens(), "tokens from the cache")
# The route answers 400 while requests run; with a timeout it waits for them.
print(client.post("/flush_cache?timeout=10").raise_for_status().text.strip())
print("after it:", cached_tokens(), "tokens from the cache")
