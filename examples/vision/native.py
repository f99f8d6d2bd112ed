"""Ask about a picture with the route `/generate`.

Run `python examples/vision/native.py --url URL`.

The prompt is the whole text, so it contains the model's placeholder where the picture belongs.
"""

import argparse
import base64
from pathlib import Path

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--image", type=Path, default=Path(__file__).parent / "drawing.png")
options = parser.parse_args()

QUESTION = "What colour is the circle?"
text = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
body = {
    "text": text,
    "image_data": base64.b64encode(options.image.read_bytes()).decode(),
    "sampling_params": {"temperature": 0, "max_new_tokens": 32},
}
answer = httpx.post(f"{options.url}/generate", json=body, timeout=120).raise_for_status().json()
print(QUESTION, answer["text"])
meta = answer["meta_info"]
print(meta["prompt_tokens"], "tokens in the prompt,", meta["image_tokens"], "of them the picture's")
