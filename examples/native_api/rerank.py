"""Order documents by how well they answer a query.

Run `python examples/native_api/rerank.py --url URL`.
"""

import argparse

import requests

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
server = parser.parse_args().url
model = requests.get(f"{server}/model_info", timeout=60).json()["model_path"]

# compute rerank scores for query and documents
url = f"{server}/v1/rerank"
data = {
    "model": model,
    "query": "what is panda?",
    "documents": [
        "hi",
        "The giant panda (Ailuropoda melanoleuca), sometimes called a panda bear or simply panda, "
        "is a bear species endemic to China.",
    ],
}

response = requests.post(url, json=data, timeout=60)
response.raise_for_status()
response_json = response.json()
for item in response_json:
    print(f"Score: {item['score']:.2f} - Document: '{item['document']}'")
