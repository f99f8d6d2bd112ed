"""Get the vector of a text from an embedding model.

Run `python examples/native_api/encode.py --url URL`.
"""

import argparse

import requests

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
server = parser.parse_args().url
model = requests.get(f"{server}/model_info", timeout=60).json()["model_path"]

url = f"{server}/encode"
data = {"model": model, "text": "Once upon a time"}

response = requests.post(url, json=data, timeout=60)
response.raise_for_status()
response_json = response.json()
print(f"Text embedding (first 10): {response_json['embedding'][:10]}")
