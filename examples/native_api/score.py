"""Get the probabilities of some tokens directly after a text.

Run `python examples/native_api/score.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=60)


def first_token(text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    return client.post("/tokenize", json=body).raise_for_status().json()["tokens"][0]


cities = ["Paris", "Rome", "Tokyo"]
body = {
    "query": "The capital of",
    "items": [" France is", " Italy is", " Japan is"],
    "label_token_ids": [first_token(f" {city}") for city in cities],
    "apply_softmax": True,
}
answer = client.post("/v1/score", json=body).raise_for_status().json()
for item, row in zip(body["items"], answer["scores"], strict=True):
    print(item.split()[0], "->", cities[row.index(max(row))], [round(each, 3) for each in row])
