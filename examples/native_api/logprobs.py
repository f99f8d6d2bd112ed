"""Choose the most probable of several continuations by their log-probabilities.

Run `python examples/native_api/logprobs.py --url URL`.
"""

import argparse

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url

prompt = "The capital of France is"
choices = [" Paris", " Rome", " Tokyo"]
tokens = httpx.post(f"{url}/tokenize", json={"prompt": prompt}, timeout=60).json()["count"]
body = {
    "text": [prompt + choice for choice in choices],
    # Generate nothing, only score the prompt.
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": tokens - 1,
    "return_text_in_logprobs": True,
}
answers = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
scores = {}
for choice, answer in zip(choices, answers, strict=True):
    # Triples of log-probability, token id, text; the first token has no log-probability.
    triples = answer["meta_info"]["input_token_logprobs"][1:]
    scores[choice] = sum(logprob for logprob, _, _ in triples) / len(triples)
    print(choice, round(scores[choice], 3), [text for _, _, text in triples])
print("Chosen:", max(scores, key=scores.__getitem__))
