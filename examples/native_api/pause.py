"""Pause and resume generation, then release memory.

Run `python examples/native_api/pause.py --url URL`.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=600)


def generate() -> str:
    body = {
        "text": "The capital of France is",
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }
    return client.post("/generate", json=body).raise_for_status().json()["text"]


before = generate()
# "abort", the default, ends running requests; "retract" requeues them; "in_place" freezes them.
client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
with ThreadPoolExecutor(1) as pool:
    waiting = pool.submit(generate)
    time.sleep(0.5)
    print("while paused, done:", waiting.done())
    client.post("/continue_generation", json={}).raise_for_status()
    print("after it:", waiting.result() == before)

# Memory can be released only while no request runs. Requests get 503 until it is allocated again.
client.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
refused = client.post("/generate", json={"text": "a"})
print("without its memory:", refused.status_code)
client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
print("as before:", generate() == before)
