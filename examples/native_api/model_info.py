"""Show which model the server runs, and with which options.

Run `python examples/native_api/model_info.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

for key, value in httpx.get(f"{url}/model_info").raise_for_status().json().items():
    print(f"{key}: {value}")

info = httpx.get(f"{url}/server_info").raise_for_status().json()
for key in ("version", "status", "max_total_num_tokens", "max_req_input_len", "dtype", "page_size"):
    print(f"{key}: {info[key]}")
print("replicas:", len(info["internal_states"]))
