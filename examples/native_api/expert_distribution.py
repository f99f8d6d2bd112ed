"""Record which experts a model chooses.

Run `python examples/native_api/expert_distribution.py --url URL`.

The server needs `--expert-distribution-recorder-mode stat`.
"""

import argparse

import requests

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
server = parser.parse_args().url

response = requests.post(f"{server}/start_expert_distribution_record", timeout=60)
response.raise_for_status()
print(response)

url = f"{server}/generate"
data = {"text": "What is the capital of France?"}

response = requests.post(url, json=data, timeout=60)
response.raise_for_status()
print(response.json())

response = requests.post(f"{server}/stop_expert_distribution_record", timeout=60)
response.raise_for_status()
print(response)

response = requests.post(f"{server}/dump_expert_distribution_record", timeout=60)
response.raise_for_status()
print(response)
