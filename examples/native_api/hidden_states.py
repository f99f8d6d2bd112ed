"""Get the hidden states of a prompt and its answer.

Run `python examples/native_api/hidden_states.py --url URL`.

The server needs `--enable-return-hidden-states`.
"""

import argparse
import sys

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url


def ask() -> dict[str, object]:
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    if answer.is_error:
        sys.exit(f"The server refuses the request ({answer.status_code}): {answer.text}")
    return answer.json()["meta_info"]


body = {
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 4},
    "return_hidden_states": True,
}
meta = ask()
# One row for each token: first the rows of the prompt, then one row for each later token.
prompt, *later = meta["hidden_states"]
print("prompt:", len(prompt), "rows of", len(prompt[0]))
print("later tokens:", len(later), "rows of", len(later[0]))

body["return_hidden_states"] = "last"
meta = ask()
print("last alone:", len(meta["hidden_states"]), "numbers")
