"""Continue an earlier request without sending its text again.

Run `python examples/native_api/sessions.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = httpx.Client(base_url=parser.parse_args().url, timeout=60)

session = client.post("/open_session", json={"capacity_of_str_len": 4096}).raise_for_status().json()
rid = None
for text in ("The capital of France is", " The capital of Japan is", " The capital of Italy is"):
    body = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "stop": ["."]},
        "session_params": {"id": session, "rid": rid},
    }
    answer = client.post("/generate", json=body).raise_for_status().json()
    meta = answer["meta_info"]
    print(
        f"{text} ->{answer['text']}   ({meta['prompt_tokens']} tokens of prompt, "
        f"{meta['cached_tokens']} of them cached)"
    )
    # The next request continues this one, including its answer.
    rid = meta["id"]
client.post("/close_session", json={"session_id": session}).raise_for_status()
