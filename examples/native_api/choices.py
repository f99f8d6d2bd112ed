"""Find which of several continuations is the most probable, with `/v1/select`.

Run `python examples/native_api/choices.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=60)

cities = ["London", "Paris", "Berlin"]
body = {"text": "The capital of France is", "choices": [f" {city}" for city in cities]}
answer = client.post("/v1/select", json=body).raise_for_status().json()
for city, choice in zip(cities, answer["choices"], strict=True):
    print(city, round(choice["prob"], 3), [text for _, _, text in choice["token_logprobs"]])
print("answer:", max(zip(cities, answer["choices"], strict=True), key=lambda c: c[1]["prob"])[0])
