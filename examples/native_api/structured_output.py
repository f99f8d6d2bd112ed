"""Get answers in a given form, such as JSON with a schema.

Run `python examples/native_api/structured_output.py --url URL`.

The server needs a grammar library; `make serve` brings one.
"""

import argparse
import json

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Tokyo"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
for constraint in (
    {"json_schema": json.dumps(schema)},
    {"regex": "[0-9]{4}-[0-9]{2}"},
    {"ebnf": 'root ::= "yes" | "no"'},
):
    body = {
        "text": "The capital of France is",
        "sampling_params": {"temperature": 0, "max_new_tokens": 128, **constraint},
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
    (kind,) = constraint
    print(f"{kind}: {answer['text']}")

# A grammar that cannot be followed is refused; other requests are not affected.
body["sampling_params"] = {"regex": "(a+)+b"}
refused = httpx.post(f"{url}/generate", json=body, timeout=60)
print(refused.status_code, refused.json()["error"]["message"])
