"""Ask about a picture in a chat, then about two.

Run `python examples/vision/chat.py --url URL`.

Start a server with `python -m server.launch --model-path demo-vision`.
"""

import argparse
import base64
from pathlib import Path

import httpx

PICTURE = Path(__file__).parent / "drawing.png"
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--image", type=Path, default=PICTURE)
options = parser.parse_args()


def image_part(path: Path) -> dict:
    content = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def ask(*parts: dict) -> str:
    body = {
        "model": "demo-vision",
        "messages": [{"role": "user", "content": list(parts)}],
        "temperature": 0,
        "max_tokens": 64,
    }
    answer = httpx.post(f"{options.url}/v1/chat/completions", json=body, timeout=120)
    content: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return content


for question in ("What is in the image?", "How many squares are there?"):
    # The second question reuses the picture's vectors and its part of the prompt.
    print(question, ask(image_part(options.image), {"type": "text", "text": question}))
both = [image_part(options.image), image_part(PICTURE)]
print("Two pictures:", ask(*both, {"type": "text", "text": "Are the images the same?"}))
