"""Send a prompt as embeddings instead of tokens.

Run `python examples/native_api/input_embeds.py --url URL`.

The server needs `--disable-radix-cache`. Here the embeddings are rows of the model's own embedding
matrix, so the answer is the same as for the tokens.
"""

import argparse
import sys
from pathlib import Path

import httpx
from safetensors import safe_open

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=60)

folder = Path(client.get("/model_info").raise_for_status().json()["model_path"])
ids = client.post("/tokenize", json={"prompt": "The wheel turns"}).json()["tokens"]
with safe_open(folder / "model.safetensors", framework="pt") as weights:
    rows = weights.get_tensor("model.embed_tokens.weight")[ids].float().tolist()

sampling = {"temperature": 0, "max_new_tokens": 8}
by_rows = client.post("/generate", json={"input_embeds": rows, "sampling_params": sampling})
if by_rows.is_error:
    sys.exit(f"The server refuses the request ({by_rows.status_code}): {by_rows.text}")
by_ids = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
print(repr(by_rows.json()["text"]))
print("as with tokens:", by_rows.json()["output_ids"] == by_ids.json()["output_ids"])
