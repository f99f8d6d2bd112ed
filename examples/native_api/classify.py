"""Score two answers with a reward model.

Run `python examples/native_api/classify.py --url URL`.
"""

import argparse

import requests
from transformers import AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
server = parser.parse_args().url
model = requests.get(f"{server}/model_info", timeout=60).json()["model_path"]

PROMPT = "What is the range of the numeric output of a sigmoid node in a neural network?"

RESPONSE1 = "The output of a sigmoid node is bounded between -1 and 1."
RESPONSE2 = "The output of a sigmoid node is bounded between 0 and 1."

CONVS = [
    [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE1}],
    [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE2}],
]

tokenizer = AutoTokenizer.from_pretrained(model)
prompts = tokenizer.apply_chat_template(CONVS, tokenize=False, return_dict=False)

url = f"{server}/classify"
data = {"model": model, "text": prompts}

response = requests.post(url, json=data, timeout=60)
response.raise_for_status()
for each in response.json():
    print(f"reward: {each['embedding'][0]}")
