"""Convert a text to tokens and back.

Run `python examples/native_api/tokenize_round_trip.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

text = "The server's own tokenizer counts what a prompt will cost."
body = {"prompt": text, "add_special_tokens": False}
answer = httpx.post(f"{url}/tokenize", json=body).raise_for_status().json()
print(answer["count"], "tokens of at most", answer["max_model_len"], ":", answer["tokens"])

body = {"tokens": answer["tokens"], "skip_special_tokens": True}
back = httpx.post(f"{url}/detokenize", json=body).raise_for_status().json()["text"]
print("the same:", back == text)
