"""Check the server's health with each of its four routes.

Run `python examples/native_api/health.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

for path, means in (
    ("/livez", "its processes turn"),
    ("/readyz", "it takes requests"),
    ("/health", "the same, on the route of SGLang's clients"),
    ("/health_generate", "it has just generated a token"),
):
    print(httpx.get(f"{url}{path}", timeout=60).status_code, path, "-", means)
load = httpx.get(f"{url}/v1/loads").raise_for_status().json()["loads"][0]
print("running:", load["num_running_reqs"], "waiting:", load["num_waiting_reqs"])
