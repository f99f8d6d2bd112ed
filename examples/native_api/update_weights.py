"""Load other weights into the running server.

Run `python examples/native_api/update_weights.py --url URL [--model-path DIR]`.

Without --model-path it reloads the weights that are in use, which changes nothing.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--model-path", help="folder of the same architecture and size")
args = parser.parse_args()
client = httpx.Client(base_url=args.url, timeout=600)

path = args.model_path or client.get("/model_info").raise_for_status().json()["model_path"]
answer = client.post("/update_weights_from_disk", json={"model_path": path}).json()
print(answer["success"], answer["message"])

# A failed load changes nothing: the old weights stay in use.
answer = client.post("/update_weights_from_disk", json={"model_path": "no/such-model"}).json()
print(answer["success"], answer["message"])
